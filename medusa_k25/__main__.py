"""`python -m medusa_k25` lists the verbs in the order in which they are used."""

from medusa_k25.config import VERBS


def main() -> None:
    width = max(map(len, VERBS))
    print("usage: python -m medusa_k25.VERB [+exp=NAME] [group=OPTION ...] [key=value ...]\n")
    for name, summary in VERBS.items():
        print(f"  {name:<{width}}  {summary}")
    print("\npython -m medusa_k25.VERB --help shows the groups, the keys and examples.")


if __name__ == "__main__":
    main()
