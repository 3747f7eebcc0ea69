"""What families are made of: layers, attention, output heads, rematerialisation, precision."""
