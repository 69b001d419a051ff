"""What the manager asks of nodes, and knows of them."""
