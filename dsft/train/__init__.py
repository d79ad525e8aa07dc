"""A process and plan.json into a trained model. The only folder of dsft that imports torch.

`python -m dsft.train plan.json` is started once a rank, by any launcher. Read `run.py` for the order of events and
`loop.py` for the training itself; `engines/` wraps the model, one module an engine.
"""
