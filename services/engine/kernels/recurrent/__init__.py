"""The reference of what layers with a recurrent state have in place of attention."""
