// For inductor, which passes handles.
void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {
  const auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, INPUTS);
  void* addresses[INPUTS];
  for (size_t i = 0; i < INPUTS; i++) addresses[i] = inputs[i].data_ptr();
  purestep_body(addresses, output_handles);
}

// For `launcher.py`, called with the GIL held, which the body releases.
extern "C" __attribute__((visibility("default"))) PyObject* purestep_call(void** addresses) {
  std::array<AtenTensorHandle, OUTPUTS> made{};
  try {
    purestep_body(addresses, made.data());
    if (PyErr_Occurred()) return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  PyObject* const list = PyList_New(OUTPUTS);
  for (size_t i = 0; list && i < OUTPUTS; i++)
    PyList_SET_ITEM(list, i, PyCapsule_New((void*)made[i], nullptr, nullptr));
  return list;
}
