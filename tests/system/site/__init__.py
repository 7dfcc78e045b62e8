"""The blocks of code in the pages for users run as they stand there, against real servers."""
