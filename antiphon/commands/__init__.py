"""The commands of `antiphon`, a module for each group of them.

command     what a command is
tree        the list of all commands, and their parser
parser      errors and help of the parser
ending      how a command ends: exit codes and error messages
completion  scripts for shells
others      the commands themselves: their flags, and the functions that run them

To add a command, write its `Command` in the module of its group. The modules import what a command needs only when it
runs, so that `antiphon --help` stays fast.
"""
