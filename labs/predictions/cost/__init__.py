"""What GPUs cost to rent, also where the seller may take them back."""
