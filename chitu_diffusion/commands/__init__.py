"""What the subcommands of `chitu` do, one module each."""
