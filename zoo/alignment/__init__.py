"""Around the core: training on pairs of answers, and beside a teacher."""
