// redsync as a peer, over go-redis, as its README shows it.
//
// It gives up after 32 attempts; here it tries for as long as the driver wants, at the pace that it comes with, or, tuned,
// every 5 ms.
package main

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/go-redsync/redsync/v4"
	redispool "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"leasehold/bench/work"
)

type client struct {
	connections []*redis.Client
	sync        *redsync.Redsync
	ttl         time.Duration
}

type lock struct{ mutex *redsync.Mutex }

func main() {
	library := "redsync " + work.Version("github.com/go-redsync/redsync/v4") +
		", go-redis " + work.Version("github.com/redis/go-redis/v9")
	work.Serve(library, open)
}

func open(order *work.Order) (work.Client, error) {
	c := &client{ttl: order.TTL()}
	var pools []redispool.Pool
	for _, url := range order.URLs {
		options, err := redis.ParseURL(url)
		if err != nil {
			return nil, err
		}
		if order.Clients > 1 {
			options.PoolSize = 1
		}
		connection := redis.NewClient(options)
		// A server that is down is part of the work of a quorum.
		if err := connection.Ping(context.Background()).Err(); err != nil && len(order.URLs) == 1 {
			return nil, err
		}
		c.connections = append(c.connections, connection)
		pools = append(pools, goredis.NewPool(connection))
	}
	c.sync = redsync.New(pools...)
	return c, nil
}

func (c *client) Lock(run *work.Order, name string) (work.Lock, error) {
	if run.Lock != "mutex" {
		return nil, errors.New("redsync has only a mutex")
	}
	options := []redsync.Option{redsync.WithExpiry(c.ttl), redsync.WithTries(math.MaxInt32)}
	if run.IsTuned {
		options = append(options, redsync.WithRetryDelay(5*time.Millisecond))
	}
	return &lock{c.sync.NewMutex(name, options...)}, nil
}

func (c *client) Close() {
	for _, connection := range c.connections {
		_ = connection.Close()
	}
}

func (l *lock) Take(ctx context.Context) error { return l.mutex.LockContext(ctx) }

func (l *lock) Give() error {
	_, err := l.mutex.Unlock()
	return err
}

func (l *lock) IsHeld() bool { return time.Now().Before(l.mutex.Until()) }
