"""The command line: commands, options, output."""
