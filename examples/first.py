"""Train a small network on scikit-learn's handwritten digits. Stop it with Ctrl-C and run it again: it continues."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import purestep as ps

torch.manual_seed(0)
digits = load_digits()  # 1,797 images of 8 x 8 pixels
images = torch.tensor(digits.data, dtype=torch.float32) / 16
train, val = random_split(TensorDataset(images, torch.tensor(digits.target)), [1500, 297])
loaders = {"train": DataLoader(train, batch_size=64, shuffle=True), "val": DataLoader(val, batch_size=297)}

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10))
objective = ps.supervised(torch.nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})
program = ps.program(model, objective, ps.optim.adamw(3e-3))

result = ps.fit(program.init(seed=0), loaders, program, epochs=10, snapshots="runs/first")

predict = program.bind(result.state)  # a plain function, in evaluation mode
image, label = val[0]
print(f"validation accuracy {result.history['val_accuracy'][-1]:.3f}")
outputs = predict(ps.to_device(image[None], result.state))  # on a GPU if there is one, as the state
print(f"predicted {outputs.argmax().item()}, label {label.item()}")
