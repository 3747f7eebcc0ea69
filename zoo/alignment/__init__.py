"""Around the core: training on pairs of answers, on rewards, and beside a teacher."""
