def test_sorted():
    with open("/app/sorted.txt") as file:
        assert file.read().split() == ["ada", "bob", "cy"]
