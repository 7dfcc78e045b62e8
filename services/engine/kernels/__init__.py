"""Operations: one file each, with formula, reference, kernel and launcher."""
