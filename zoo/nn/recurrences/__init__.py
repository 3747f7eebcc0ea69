"""Recurrences over the steps of rows; with a matrix as state they train in chunks of products."""
