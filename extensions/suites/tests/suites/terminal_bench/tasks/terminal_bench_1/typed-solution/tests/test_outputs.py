def test_numbers():
    with open("/app/numbers.txt") as file:
        assert file.read().split() == ["1", "2", "3", "4", "5"]
