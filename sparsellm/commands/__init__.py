"""What each command does, `main(arguments)`: sparsellm/cli.py imports one of them once it has said that it begins."""
