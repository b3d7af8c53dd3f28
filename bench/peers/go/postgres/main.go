// PostgreSQL's advisory locks as a peer, over pgx: pg_advisory_lock on a connection of the client's own. The lock is the session's
// and has no ttl; a client that dies loses it with its connection.
package main

import (
	"context"
	"fmt"
	"hash/fnv"

	"github.com/jackc/pgx/v5"

	"leasehold/bench/work"
)

type client struct {
	url        string
	connection *pgx.Conn
}

type lock struct {
	*client
	key int64
}

func main() {
	work.Serve("pgx "+work.Version("github.com/jackc/pgx/v5"), open)
}

func open(order *work.Order) (work.Client, error) {
	c := &client{url: order.URLs[0]}
	return c, c.connect()
}

func (c *client) connect() error {
	connection, err := pgx.Connect(context.Background(), c.url)
	if err == nil {
		c.connection = connection
	}
	return err
}

func (c *client) Lock(run *work.Order, name string) (work.Lock, error) {
	if run.Lock != "mutex" {
		return nil, fmt.Errorf("PostgreSQL has no lock that is called %s", run.Lock)
	}
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(name))
	return &lock{c, int64(hash.Sum64())}, nil
}

func (c *client) Close() { _ = c.connection.Close(context.Background()) }

// Take connects again where the last connection is gone: pgx closes it after an error, and to cancel a waiter.
func (l *lock) Take(ctx context.Context) error {
	if l.connection.IsClosed() {
		if err := l.connect(); err != nil {
			return err
		}
	}
	_, err := l.connection.Exec(ctx, "SELECT pg_advisory_lock($1)", l.key)
	return err
}

func (l *lock) Give() error {
	_, err := l.connection.Exec(context.Background(), "SELECT pg_advisory_unlock($1)", l.key)
	return err
}

// IsHeld asks the server, because nothing else tells that the session has ended.
func (l *lock) IsHeld() bool { return l.connection.Ping(context.Background()) == nil }
