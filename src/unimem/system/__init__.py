"""What the machine is and allows, and each foreign library behind one file."""
