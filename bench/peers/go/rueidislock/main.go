// rueidislock as a peer, with the options that its README shows: one key, and no invalidations of its own. The lock that is called
// majority has three keys instead, as by default.
package main

import (
	"context"
	"errors"

	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"leasehold/bench/work"
)

type client struct{ locker, majority rueidislock.Locker }

type lock struct {
	locker rueidislock.Locker
	name   string
	held   context.Context
	give   context.CancelFunc
}

func main() {
	work.Serve("rueidislock "+work.Version("github.com/redis/rueidis"), open)
}

func open(order *work.Order) (work.Client, error) {
	if len(order.URLs) > 1 {
		return nil, errors.New("rueidislock has no quorum of independent servers")
	}
	option, err := rueidis.ParseURL(order.URLs[0])
	if err != nil {
		return nil, err
	}
	if order.Clients > 1 {
		// Its buffers are for a client that a whole program shares: a megabyte each.
		option.ReadBufferEachConn, option.WriteBufferEachConn, option.RingScaleEachConn = 1<<14, 1<<14, 6
	}
	lockers := [2]rueidislock.Locker{}
	for keys := range lockers {
		lockers[keys], err = rueidislock.NewLocker(rueidislock.LockerOption{
			ClientOption:   option,
			KeyMajority:    int32(keys) + 1,
			KeyValidity:    order.TTL(),
			NoLoopTracking: true,
		})
		if err != nil {
			return nil, err
		}
	}
	return &client{lockers[0], lockers[1]}, nil
}

func (c *client) Lock(run *work.Order, name string) (work.Lock, error) {
	switch run.Lock {
	case "mutex":
		return &lock{locker: c.locker, name: name}, nil
	case "majority":
		return &lock{locker: c.majority, name: name}, nil
	default:
		return nil, errors.New("rueidislock has only a mutex")
	}
}

func (c *client) Close() {
	c.locker.Close()
	c.majority.Close()
}

// Take waits under a context of its own, since the one that it is given would end the lock with the run.
func (l *lock) Take(ctx context.Context) error {
	waiting, cancel := context.WithCancel(context.Background())
	keep := context.AfterFunc(ctx, cancel)
	held, give, err := l.locker.WithContext(waiting, l.name)
	if err != nil {
		cancel()
		return err
	}
	if !keep() {
		give()
		return ctx.Err()
	}
	l.held, l.give = held, func() {
		give()
		cancel()
	}
	return nil
}

func (l *lock) Give() error {
	lost := l.held.Err()
	l.give()
	return lost
}

func (l *lock) IsHeld() bool { return l.held != nil && l.held.Err() == nil }
