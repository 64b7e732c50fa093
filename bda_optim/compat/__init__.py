"""What lets code written for other libraries run on this one."""
