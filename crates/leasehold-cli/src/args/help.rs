//! The long texts of the help.

use crate::exit::TABLE;

/// The addresses of stores.
pub(super) const STORES: &str = "\
Addresses of stores, for --store and LEASEHOLD_STORE:
  sqlite:PATH                         a file, for the processes of a machine
  redis://HOST[:PORT][/DATABASE]      one server; USER:PASSWORD@ comes before
                                      the host
  rediss://...                        the same with TLS
  redis+unix:///PATH                  one server, through its Unix socket
  redis-sentinel://HOST,HOST/SERVICE  the master that Sentinels name
  redis-cluster://HOST,HOST           a cluster
  redlock://HOST,HOST,HOST            a quorum of independent servers
  postgres://HOST/DATABASE            a database; postgresql: is the same
  postgresql://HOST/DATABASE          PGHOST, PGUSER, PGPASSWORD, PGDATABASE and
                                      others count
  memory:                             this process only; excludes no other
Parameters follow ?, joined by &. In a user, a password, a path or a value every
character except letters, digits and -._~ is written as % and two hex digits.
Process lists show arguments, so put an address with a password into
LEASEHOLD_STORE or the configuration file. docs/operations.md has all parameters.

For passwords that expire or are replaced, leave the password out, and pass
--auth-command 'PROGRAM ARGUMENT...', which is started without a shell. It prints
one line with the password, or
  {\"user\": ..., \"password\": ..., \"expires_at\": \"2030-01-31T12:00:00Z\"}
each of which may be left out. LEASEHOLD_AUTH_ROLE (redis, sentinel, cluster-node
or postgres), LEASEHOLD_AUTH_HOST, LEASEHOLD_AUTH_PORT and LEASEHOLD_AUTH_USER
name the server. It may take 9.5 seconds. Its stderr is shown on a terminal only.";

/// The last lines of each command's help.
pub(super) const POINTERS: &str = "\
Exit codes: leasehold help exit-codes. Addresses: leasehold help stores.";

/// The end of the help of the whole program.
pub(super) fn overview() -> String {
    format!("{EXAMPLES}\n\n{STORES}\n\n{TABLE}")
}

const EXAMPLES: &str = "\
Examples:
  leasehold run report -- ./report.sh            wait for the lock, then run
  leasehold run -n deploy -- ./deploy.sh         exit with 1 if the lock is held
  leasehold run -w 2.5 deploy -- ./deploy.sh     wait up to 2.5 seconds
  leasehold run backup -c 'tar c /srv | gzip > b.tgz'
  leasehold run --once-per 1h lottery -- ./draw  on one of several hosts
  leasehold run --semaphore 3 encode -- ./encode three at a time
  leasehold run -s site -- ./crawl               shared with other runs with -s
  leasehold run -x site -- ./publish             exclusive
  leasehold run a b -- ./move                    two locks, both or none
  leasehold elect scheduler -- ./scheduler       on one of many hosts
  export LEASEHOLD_ID=$(leasehold acquire --ttl 5m deploy)
                                                 a lease for several commands
  leasehold renew; leasehold release             of that lease
  leasehold ls
  leasehold show deploy
  leasehold release --force deploy
  leasehold watch                                holders and queues, live
  leasehold wait deploy                          until it is free
  leasehold doctor                               check the store's settings
  leasehold serve --listen unix:locks.sock       locks over HTTP, and a dashboard

Without --store and LEASEHOLD_STORE, the store is a file of the current user:
sqlite:$XDG_STATE_HOME/leasehold/locks.db, or
~/.local/state/leasehold/locks.db. Two users therefore have different stores and
do not exclude each other: for instance root's cron and your shell.
Defaults of options can be in the environment (see each option) and in a file:
$XDG_CONFIG_HOME/leasehold/config.toml, or the file that LEASEHOLD_CONFIG names.
Its keys are the long options. Those of all commands are at the top, and those of
one command in a table with its name:
  store = \"redis://cache.example\"
  [run]
  ttl = \"30s\"
The command line takes precedence over the environment, and the environment over
the file.
An option of the file is ignored if it can't be used together with what is typed
or in the environment. An option that is repeatable may be a list.
For locks that several users share, create a directory for their group once, with
an owner who is not root:
  install -d -m 2770 -o USER -g GROUP /var/lib/leasehold
Then name the file in each job, also in crontabs:
  LEASEHOLD_STORE=sqlite:/var/lib/leasehold/locks.db leasehold run ...
leasehold ls, show and doctor print the address of their store.";

pub(super) const ACQUIRE: &str = "\
The lease belongs to no process. It expires after --ttl unless it is renewed:
  LEASEHOLD_ID=$(leasehold acquire --ttl 5m deploy) || exit
  export LEASEHOLD_ID            renew, status and release read it
  ./build.sh
  leasehold renew || exit        it lasts for another 5 minutes from now
  ./deploy.sh
  leasehold release
If the lease has ended, renew, status and release exit with 1. leasehold status
shows the lease without renewing it. These commands work on every host that
reaches the store.

If the id can't be written, the lease is released. > /dev/null discards the id,
and so does a closed stdout: the lease then lasts until its --ttl is over.

Any client of the store can renew and release the lease with its id, so treat the
id as a password: ls and show do not print it, and it can't be guessed. Process
lists show arguments, so keep it in LEASEHOLD_ID, or pipe it:
  leasehold release - < id.txt
Without the id, leasehold release --force releases the lock.

To run one command under a lock, use leasehold run: it renews the lease, and
stops the command if the lease is lost.

With --json the output is one object:
  id             the id of the lease
  token          the fencing token: higher than that of every earlier holder of
                 this lock
  kind, name     the lock
  store          the store's address, without its password
  expires_in_ms  the time left";

pub(super) const RUN: &str = "\
Examples:
  leasehold run report -- ./report.sh            wait in the queue, then run
  leasehold run -n deploy -- ./deploy.sh         exit with 1 if the lock is held
  leasehold run -w 30s --ttl 1m deploy -- ./deploy.sh
                                                 wait for half a minute at most
  leasehold run backup -c 'tar c /srv | gzip > b.tgz'
  leasehold run --once-per 1h lottery -- ./draw  on one of several hosts

leasehold exits with the code of the command; with 1 if the lock was not
acquired, 124 if the lease was lost, and 125 if leasehold itself failed.

The command gets
  LEASEHOLD_NAME      the lock's name; of several locks one name per line
  LEASEHOLD_TOKEN     the fencing token: higher than that of every earlier
                      grant of this lock. Pass it to the protected resource,
                      which must refuse tokens lower than the highest it has
                      seen. Of several locks one token per line
  LEASEHOLD_DEADLINE  when the lease would expire, as known when the command
                      started: seconds since 1970 with three decimals. While
                      the command runs, the lease is renewed at a third of
                      its ttl
  LEASEHOLD_STORE     the store's address, without its password: pass the
                      password to a nested leasehold in another way
  LEASEHOLD_TOKENS    the tokens of this run's leases, as show prints them, and
                      those of the enclosing runs. If a nested run would wait
                      for an enclosing one, it exits at once with 2

With several names, their mutexes are acquired together: all of them or none, in
an order that can't deadlock. If one of their leases is lost, the command is
stopped as if all were. A name that begins with a dash is passed by --name:
  leasehold run --name=-x -- COMMAND

If systemd runs leasehold as a service with Type=notify, the service counts as
started once the lock is held and the command runs.

The command runs in its own process group. On a terminal it behaves as if it were
in leasehold's group. If leasehold is in the foreground, and neither its input
nor its output is a pipe, the command is in the foreground from its start.
Otherwise, if the job is in the foreground, the command gets the terminal when it
reads from it or sets its modes. Another process of the pipeline gets the
terminal back in the same way. If Ctrl-C ends the command, it also ends the job:
leasehold then ends by INT itself.

leasehold forwards INT, TERM, HUP, QUIT, USR1, USR2, WINCH and TSTP to the
command's group. A signal that was ignored when leasehold started, as by nohup,
is not forwarded.

If the lease can't be renewed, the group gets TERM when the time left reaches
--grace, and KILL when the lease expires. If the lock is released by force, the
group gets TERM at once, and KILL after --grace. In both cases the exit code is
124, and leasehold ends only when the whole group has ended. Processes that the
command leaves in its group get KILL after --grace at the latest, and signals
until then. With --on-lost signal there is no KILL. With --on-lost ignore there
is neither TERM nor KILL.

If Ctrl-Z stops the command, leasehold stops too, and the lease expires after its
ttl. If the command is continued after that, it is killed.

If leasehold is killed by KILL, the command is killed too (on Linux), and the
lease expires after its ttl. The children of the command are not killed; with -c
the command is the shell. If work must not outlive the lease, the protected
resource must check its token. Neither KILL nor another signal reaches a command
that runs as another user: use sudo leasehold run NAME -- COMMAND instead of
leasehold run NAME -- sudo COMMAND. If COMMAND is setuid, setgid or has file
capabilities, the kernel does not kill it. A second process of leasehold then
kills it with its children. If a script starts such a program, nothing kills it.

Kinds of lock with the same name are different locks: a mutex (the default, also
with --owner), a rw lock (-s, -x) and a semaphore. To prevent mistakes, a mutex
is refused while a rw lock of the same name is in use, and the reverse. Use -x
for the exclusive mode of a lock that other runs share with -s.

With --once-per, two starts are at least nine tenths of the period apart, by the
store's clock, from the moment at which the store grants them: a command whose
grant arrives late begins that much later. All hosts can therefore start
leasehold at noon, even if their clocks differ a little. When the command ends,
with any exit code, the period is used up. If its host crashes before that, the
period is lost (at most once, the default), or another host starts the command
again (--at-least-once), which repeats the work. The period is a mutex of that
name, which the store retains: leasehold run without --once-per waits for its
end, and says so on stderr. Use another name for it.

The lock is released as soon as the command ends, even if the command leaves
processes behind. All users of the store can see the command line. --label
replaces it with another text.";

pub(super) const ELECT: &str = "\
Start it on every host that may run the command. One host is elected and runs the
command; the others wait. When the command ends, with any exit code, its host
resigns, and the next host starts the command at once. The host where it ended
campaigns again after a pause. The pause doubles from --backoff to --backoff-max,
so a command that fails on every host is not restarted continuously. After a run
of more than --backoff-max, the pause is --backoff again. If the command can't be
started at first, leasehold exits with 126 or 127. If it can't be started later,
leasehold retries after the same pauses.

If a host dies, its lease expires after the ttl, and the next host starts the
command. The environment of the command, the handling of a lost lease, --on-lost
and --grace are the same as for run: see leasehold run --help. If the store is
unavailable, the host campaigns again after at most 2 s, whatever --backoff-max.

INT and TERM are forwarded to the command. When it has ended, leasehold resigns
and exits with the command's code. Other signals, such as HUP and QUIT, are
forwarded too, but leasehold continues: if the command ends, it is restarted as
usual. While no command runs, these signals have no effect. If leasehold's input
is a terminal, HUP and QUIT also end leasehold. --label is the text that
leasehold show --kind election NAME prints for the leader.";

pub(super) const WATCH: &str = "\
Keys of the live view:
  Up, Down, j, k  select a lock; Enter opens it, Esc goes back
  /               filter by a text in any column; Esc clears the filter
  s               sort by name, by the time held, or by the number of waiters
  r               release the first holder by force, after a confirmation; the
                  holder detects that at its next renewal
  q               quit

With --plain or --json each change is a line: a grant, the end of a lease, and a
new number of waiters. A lease that begins and ends between two refreshes is not
seen. The objects of --json have
  time_ms     when it was seen, since 1970
  event       granted, ended or waiting
  kind, name  the lock
  waiting     the number of waiters
  holder      as `show --json` prints it, or null";

pub(super) const SHOW: &str = "\
With --json the output is one value with these keys. Later versions may add keys:
  store             the store's address, without its password
  kind, name        the lock; the kinds are mutex, semaphore, rw, election,
                    latch and barrier
  capacity, in_use  both 1 for a mutex that is held. For a semaphore, its
                    permits and the granted ones. For a rw lock, a writer
                    uses the whole capacity. For a barrier, its parties and
                    the arrived ones. 0 if the lock is unused
  rounds            the number of recent rounds of a barrier that the store
                    remembers; 0 for other kinds
  last_token        the last fencing token that was granted, or null
  holders           a list, empty if the lock is free; each has
                    client         a name for the holder's client
                    token          its fencing token
                    weight         its share of the capacity
                    mode           read, upgradable or write for a rw lock,
                                   otherwise null
                    owner          the named owner (run --owner), or null
                    held_for_ms    the time since the grant
                    expires_in_ms  the time until the lease expires unless it
                                   is renewed
                    retained       true: the lock was released, but is
                                   retained until it expires (run --min-hold)
                    metadata       host, pid, program, label and trace_id, each
                                   of them a value or null
  waiters           a list in queue order; each has client, weight, mode,
                    metadata and
                    position       1 for the next waiter
                    waiting_for_ms the time since it was queued
                    skipped        true: its client was unreachable. The
                                   waiter keeps its position
  foreign           on Redis: the key has a value of another program, with
                    expires_in_ms, or null

ls --json prints {\"store\": ..., \"locks\": [...]} with such values. release --json
prints {\"released\": [...]} with such holders.";

pub(super) const DOCTOR: &str = "\
It prints its findings, the most severe first:
  danger    one lock can get two holders, or locks are unavailable
  advice    a setting should be improved, or could not be read
  fine      nothing to do
The id of each finding is in brackets, and is the same in later versions. With
--accept ID the exit code does not depend on that finding, for example if a test
server needs no persistence. The line after > is the fix: a command for the
server's console (redis-cli), its configuration file, or a shell. The observed
facts about each server, or about the file, follow.

It changes no setting and leaves nothing behind. On a Redis server it acquires
and releases a test lock to measure the cost, and tests each right that the user
needs. docs/operations.md lists these rights, and those of doctor itself.

With --json the output is one value with these keys. Later versions may add keys:
  store       the store's address, without its password
  dangerous   whether there is a danger that was not accepted; the exit code
              is 1 in that case
  components  a list: servers, sentinels, cluster, clocks, or a file. Each has
              name
              facts     what was observed: an object of texts
              findings  a list; each has
                        id        the id of the check
                        accepted  whether --accept names the id
                        severity  danger, advice or fine
                        what      what was found
                        why       why it matters for locks
                        remedy    the fix, or null";

#[cfg(feature = "serve")]
pub(super) const SERVE: &str = "\
The addresses are printed on stdout when the server is ready:
  leasehold serve --listen unix:locks.sock
  curl --unix-socket locks.sock -X POST localhost/v1/locks/mutex/a/acquire

Only the user of the server can use its Unix socket, and needs no token. Over TCP
every request needs a token, from the file of --tokens or the environment:
  LEASEHOLD_SERVE_TOKEN       may acquire, renew, release and read
  LEASEHOLD_SERVE_READ_TOKEN  may only read
A line of the file is NAME RIGHTS TOKEN [PREFIX...]. The name is what the log and
the limits call the caller. RIGHTS are read, write and force, with commas: every
token may read, write is for acquire, renew and release, and force is for
releasing the leases of others. With prefixes, the names of the token's locks
begin with one of them:
  ci     write        4f1c7a0e9b2d6853a1f04c7e  builds: deploys:
  oncall write,force  c09e5d1b7f3a8642d5b81f6a
A token has 16 to 1024 characters; openssl rand -hex 16 prints one. Callers send
it as Authorization: Bearer TOKEN; it is not the fencing token LEASEHOLD_TOKEN
that run gives to its command. The page at /
is a dashboard, /metrics is for Prometheus, and /v1/openapi.json describes the
API. The dashboard of a socket on another host, at http://localhost:8430/:
  ssh -N -L 8430:/run/leasehold/serve.sock HOST

On TERM or INT the server stops: requests that wait are answered at once, and
nothing new is granted. Leases stay in the store; their callers renew and release
them at another server, or at this one after its restart. On HUP it reads the
tokens, the certificate and the configuration file again; a changed file of
tokens or certificates is read without it, too.";
