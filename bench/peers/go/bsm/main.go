// bsm/redislock as a peer, over go-redis, as its README shows it.
//
// It does not wait unless told to; here it tries every 100 ms, or, tuned, every 5 ms.
package main

import (
	"context"
	"errors"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"

	"leasehold/bench/work"
)

type client struct {
	connection *redis.Client
	locks      *redislock.Client
	ttl        time.Duration
}

type lock struct {
	client *client
	name   string
	pause  time.Duration
	held   *redislock.Lock
	until  time.Time
}

func main() {
	work.Serve("bsm/redislock "+work.Version("github.com/bsm/redislock"), open)
}

func open(order *work.Order) (work.Client, error) {
	if len(order.URLs) > 1 {
		return nil, errors.New("bsm/redislock has no quorum of independent servers")
	}
	options, err := redis.ParseURL(order.URLs[0])
	if err != nil {
		return nil, err
	}
	if order.Clients > 1 {
		options.PoolSize = 1
	}
	connection := redis.NewClient(options)
	if err := connection.Ping(context.Background()).Err(); err != nil {
		return nil, err
	}
	return &client{connection, redislock.New(connection), order.TTL()}, nil
}

func (c *client) Lock(run *work.Order, name string) (work.Lock, error) {
	if run.Lock != "mutex" {
		return nil, errors.New("bsm/redislock has only a mutex")
	}
	pause := 100 * time.Millisecond
	if run.IsTuned {
		pause = 5 * time.Millisecond
	}
	return &lock{client: c, name: name, pause: pause}, nil
}

func (c *client) Close() { _ = c.connection.Close() }

// Take repeats attempts, because one ends after the ttl.
func (l *lock) Take(ctx context.Context) error {
	options := &redislock.Options{RetryStrategy: redislock.LinearBackoff(l.pause)}
	for {
		began := time.Now()
		held, err := l.client.locks.Obtain(ctx, l.name, l.client.ttl, options)
		if err == nil {
			l.held, l.until = held, began.Add(l.client.ttl)
			return nil
		}
		if ctx.Err() != nil || !errors.Is(err, redislock.ErrNotObtained) {
			return err
		}
	}
}

func (l *lock) Give() error { return l.held.Release(context.Background()) }

func (l *lock) IsHeld() bool { return time.Now().Before(l.until) }
