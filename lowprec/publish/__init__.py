"""From notebooks to pages of the book: parameters, execution, figures, generated pages."""
