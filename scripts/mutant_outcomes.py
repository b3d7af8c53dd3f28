"""What became of each mutant, kept in a file from one run to the next: a mutant that was killed is not tried again."""
import concurrent.futures
import json
import sys
import time


class Outcomes:
    """One line per outcome, in JSON; the last one of a mutant counts."""

    def __init__(self, path):
        self.path = path
        self.known = {}
        try:
            with open(path) as file:
                self.known = {line["mutant"]: line["outcome"] for line in map(json.loads, file)}
        except OSError:
            pass

    def left(self, mutants):
        """Those that no run has killed. A mutant has a `name`."""
        return [mutant for mutant in mutants if self.known.get(mutant["name"], "survived") == "survived"]

    def keep(self, mutant, outcome):
        self.known[mutant["name"]] = outcome
        with open(self.path, "a") as file:
            file.write(json.dumps({"mutant": mutant["name"], "outcome": outcome}) + "\n")
        print(f"{outcome}: {mutant.get('text', mutant['name'])}", flush=True)

    def try_all(self, mutants, killer, jobs, until):
        """Keeps what `killer` finds for each mutant, until the time is over: what killed it, or None if it survived."""
        def one(mutant):
            return mutant, "not tried" if time.time() > until else killer(mutant)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for ended in concurrent.futures.as_completed([pool.submit(one, mutant) for mutant in mutants]):
                mutant, found = ended.result()
                if found != "not tried":
                    self.keep(mutant, f"killed by {found}" if found else "survived")

    def summary(self, mutants, equivalent):
        """Counts the outcomes, where `equivalent` says which mutants have no effect. Returns whether another survived. Ends the program with
        exit code 2 if none did, but some were not tried, or there are no mutants."""
        counts = {}
        for mutant in mutants:
            found = self.known.get(mutant["name"], "not tried").split(" by ")[0]
            if found == "survived" and equivalent(mutant):
                found = "equivalent"
            counts[found] = counts.get(found, 0) + 1
        print(f"{len(mutants)} mutants:", ", ".join(f"{count} {found}" for found, count in sorted(counts.items())))
        if "survived" in counts:
            return True
        if not mutants or "not tried" in counts:
            print("not every mutant was tried" if mutants else "there are no such mutants", file=sys.stderr)
            sys.exit(2)
        return False
