"""What blocks are: names of leaves, which are masked, how they are cut, and on which devices."""
