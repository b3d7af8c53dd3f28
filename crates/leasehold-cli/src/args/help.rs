//! The long texts of the help.

pub(super) const EXAMPLES: &str = "\
Examples:
  leasehold run report -- ./report.sh            wait for the lock, then run it
  leasehold run -n deploy -- ./deploy.sh         or exit with 1 at once
  leasehold run -w 2.5 deploy -- ./deploy.sh     or after 2.5 seconds
  leasehold run backup -c 'tar c /srv | gzip > b.tgz'
  leasehold run --once-per 1h lottery -- ./draw  on one of several hosts
  leasehold run --semaphore 3 encode -- ./encode three at a time
  leasehold run -s site -- ./crawl               beside others with -s, and
  leasehold run -x site -- ./publish             alone
  leasehold elect scheduler -- ./scheduler       on one of many hosts
  leasehold ls
  leasehold show deploy
  leasehold release --force deploy
  leasehold doctor                               check the store for unsafe settings

The store, without --store and LEASEHOLD_STORE, is a file of the user's own:
sqlite:$XDG_STATE_HOME/leasehold/locks.db, or
~/.local/state/leasehold/locks.db. So the jobs of root's cron and the shell of a
user have different stores and do not exclude each other, nor do two users. For
locks that several users share, make a directory for their group, once:
  install -d -m 2770 -o root -g GROUP /var/lib/leasehold
and name the file in each job, in crontabs too, with a umask that lets the group
write:
  umask 002; LEASEHOLD_STORE=sqlite:/var/lib/leasehold/locks.db leasehold run ...
leasehold ls, show and doctor say which store they look at.";

pub(super) const RUN: &str = "\
The command gets
  LEASEHOLD_NAME      the lock's name
  LEASEHOLD_TOKEN     the fencing token: higher than that of every earlier
                      grant of this lock. Pass it to the protected resource,
                      which must refuse tokens lower than the highest it has
                      seen
  LEASEHOLD_DEADLINE  when the lease ends unless it is renewed, as it was when
                      the command started: seconds since 1970 with three
                      decimals. It is renewed at a third of its ttl for as
                      long as the command runs
  LEASEHOLD_STORE     the store's address, without its password: pass the
                      password to a nested leasehold in another way
  LEASEHOLD_TOKENS    the tokens of this run and of the enclosing ones. A nested
                      run that would wait for an enclosing one, and so for
                      itself, exits at once with 2

The command runs in a process group of its own. On a terminal it behaves as if it
were in that of leasehold: it is in the foreground from its start if leasehold is
and neither its input nor its output is a pipe; otherwise it gets the terminal as
soon as it reads from it or sets its modes, if the job is in the foreground, and
another process of the pipeline gets it back in the same way. If Ctrl-C ends the
command, it ends the job: leasehold then ends by INT itself. INT, TERM, HUP, QUIT, USR1, USR2, WINCH and TSTP that leasehold gets
go to that group, except those that were ignored when it started, as nohup
does.

If the lease can't be renewed, the group gets TERM when as much is left of the
lease as --grace says, and KILL when the lease ends. If the lock is taken away
by force, it gets TERM at once, and KILL after the grace. The exit code is 124
then, and leasehold ends only when the whole group has. With --on-lost signal
there is no KILL, and with --on-lost ignore there is no TERM either.

A command that is stopped from its terminal (Ctrl-Z) stops leasehold too; the
lease then ends after its ttl, and the command is killed when it goes on later
than that.

If leasehold is killed by KILL, so is the command (on Linux), and the lease
ends by itself after its ttl. That reaches the command itself, not its
children: with -c that is the shell. What must not outlive the lease checks
its token. Nor does it, or any other signal, reach a command that becomes
another user: write sudo leasehold run NAME -- COMMAND, and not leasehold run
NAME -- sudo COMMAND. Where COMMAND is setuid, setgid or has file capabilities,
the kernel does not kill it; a second process of leasehold does then, with its
children. It does not do so for such programs that a script calls.

Kinds of lock with the same name are different locks: a mutex (the default, also
with --owner), a rw lock (-s, -x) and a semaphore. Since that is easily forgotten,
a mutex is refused while a rw lock of the same name is in use, and the other way
round: say -x instead of nothing where others say -s.

With --once-per two starts are never closer to each other than nine tenths of
the period, by the store's clock; so all hosts may start leasehold at noon, by
clocks that differ a little. When the command ends, with whatever code, it is
done for this period. If its host crashes before that, either the period is
lost (at most once, the default), or another host starts the command again
(--at-least-once), which repeats the work.

The lock is released as soon as the command ends, even if it leaves
processes behind. The command line is visible to everyone with access to
the store; --label shows another text instead.";

pub(super) const ELECT: &str = "\
Start it on every host that may run the command. One of them is elected and
runs it; the others wait. When the command ends, however that may be, its host
resigns, and the next one starts it at once. The host where it ended stands for
election again after a pause, which doubles from --backoff to --backoff-max, and
is short again once the command has run for longer than the longest pause. So
a command that fails everywhere is not started all the time. A command that
can't be started any more is tried again in the same way; one that can't be
started the first time ends leasehold, with 126 or 127.

If a host dies, its lease ends after the ttl, and the next one starts the
command. What happens when a lease is lost, what the command gets, and what
--on-lost and --grace mean is as with run: see leasehold run --help. When the
store can't be asked, the host stands for election again after 2 s at most,
whatever --backoff-max is.

INT and TERM are passed on to the command; when it has ended, leasehold resigns
and exits with the command's code. HUP, QUIT and the others are passed on too,
and leasehold continues: a command that ends is restarted as usual, and without
a command they do nothing. Where leasehold's input is a terminal,
HUP and QUIT end it as well. --label is the text that others see about the
leader: see leasehold show --kind election NAME.";

pub(super) const SHOW: &str = "\
With --json it is one value, with these keys, to which later versions only add:
  store             the store's address, without its password
  kind, name        what is locked; the kinds are mutex, semaphore, rw,
                    election, latch and barrier
  capacity, in_use  1 and 1 for a mutex that is held; for a semaphore how many
                    permits there are, and are out; for a rw lock a writer
                    takes all of the capacity; for a barrier how many
                    parties there are, and have arrived; 0 if it is unused
  rounds            how many recent rounds of a barrier the store remembers,
                    otherwise null
  last_token        the last fencing token that was given, or null
  holders           a list, empty when the lock is free; each has
                    client         the random id of the holder's connection
                    token          its fencing token
                    weight         how much of the capacity it takes
                    mode           read, upgradable or write in a rw lock,
                                   otherwise null
                    owner          the named owner (run --owner), or null
                    held_for_ms    how long it has held the lock
                    expires_in_ms  how much longer, unless it renews
                    retained       true: released, but retained until then
                                   (run --min-hold)
                    metadata       host, pid, program and label, each of them
                                   a value or null
  waiters           a list, the next one first; each has client, weight,
                    mode, metadata and
                    position       1 for the next one
                    waiting_for_ms
                    skipped        true: it did not respond when the lock was
                                   free for it, and keeps its position

ls --json prints {\"store\": ..., \"locks\": [...]} of such values, and release --json
prints {\"released\": [...]} of such holders.";

pub(super) const DOCTOR: &str = "\
It prints what it found, the worst first:
  danger    one lock can get two holders, or locks are unavailable
  advice    a setting could be better, or could not be read
  fine      nothing to do
In brackets is the id of the finding, which stays the same: with --accept ID, for
instance where a test's server needs no persistence, the exit code does not
depend on it. After > comes what to do about it: a line for the server's console
(redis-cli), its file, or a shell. Then comes what was seen of each server, or
of the file.

It changes no setting and leaves nothing behind. On a Redis server it takes
and releases a lock of its own to see what that costs, and tries each right
that the user needs; docs/operations.md has the whole rule, and that for
doctor itself.

With --json it is one value, with these keys, to which later versions only
add:
  store       the store's address, without its password
  dangerous   whether there is a danger that was not accepted; the exit code
              is 1 then
  components    a list: servers, sentinels, cluster, clocks, or a file. Each has
              name
              facts     what was observed: an object of texts
              findings  a list; each has
                        id        of the check that found it
                        accepted  whether --accept names the id
                        severity  danger, advice or fine
                        what      what was found
                        why       why it matters for locks
                        remedy    what to do, or null";
