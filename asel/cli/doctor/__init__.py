"""`asel doctor`: checks of this machine, with advice for each problem."""
