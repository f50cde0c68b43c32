"""`python -m experiments` lists the studies."""

from experiments import STUDIES


def main() -> None:
    """Prints a line for each study."""
    print("python -m experiments.NAME runs a study; --help lists its options.\n")
    width = max(map(len, STUDIES))
    for name, line in STUDIES.items():
        print(f"  {name:{width}}  {line}")


if __name__ == "__main__":
    main()
