"""The parts of families: layers, attention, output heads, rematerialisation, precision."""
