"""python -m sparsellm.import_model : see sparsellm/commands/import_model.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("import_model")
