def check_card(directory, *said: str) -> None:
    """A trained model's card says what the method is, and what sentence-transformers says of the training."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    for part in ("import st_reba", "## Method", "It was [trained](#training-details)", "## Training Details", *said):
        assert part in text
    assert "Nothing was trained" not in text
    assert "without training" not in text
