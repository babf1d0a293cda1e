"""One module per command, with `main(arguments, program)`. sparsellm/cli.py imports it after printing a first line."""
