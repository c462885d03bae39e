import sys

with open(sys.argv[1]) as file:
    print(*sorted(file.read().split()), sep="\n")
