def test_answer():
    with open("/app/answer.txt") as file:
        assert file.read().strip() == "42"
