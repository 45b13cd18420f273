"""Everything that touches the GPU: compiler, launches, graphs, tensor maps."""
