"""`make walk`: which files and functions of this repository one plain streamed chat runs, in each process."""
