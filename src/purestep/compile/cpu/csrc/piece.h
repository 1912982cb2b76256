struct Piece {
  const void* at;
  const void* data_ptr() const { return at; }
};
