// etcd's lock as a peer: the mutex of its client's package concurrency, a session for each client. The kind of lock `lease` is a key with a
// lease of its own, which the client keeps alive, as a session does: many of them over one connection.
package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"leasehold/bench/work"
)

type client struct {
	client  *clientv3.Client
	session *concurrency.Session
	ttl     int
}

type lock struct {
	*client
	name  string
	mutex *concurrency.Mutex
}

func main() {
	work.Serve("etcd client "+work.Version("go.etcd.io/etcd/client/v3"), open)
}

func open(order *work.Order) (work.Client, error) {
	endpoint := strings.Replace(order.URLs[0], "etcd://", "http://", 1)
	connection, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}})
	if err != nil {
		return nil, err
	}
	c := &client{client: connection, ttl: int(order.TTLMillis / 1000)}
	return c, c.start()
}

func (c *client) start() error {
	session, err := concurrency.NewSession(c.client, concurrency.WithTTL(c.ttl))
	if err == nil {
		c.session = session
	}
	return err
}

func (c *client) hasEnded() bool {
	select {
	case <-c.session.Done():
		return true
	default:
		return false
	}
}

// Lock is for one task of the client: to etcd all tasks of a session are the same holder.
func (c *client) Lock(run *work.Order, name string) (work.Lock, error) {
	name = "/bench/" + name
	switch run.Lock {
	case "mutex":
		return &lock{c, name, concurrency.NewMutex(c.session, name)}, nil
	case "lease":
		return &lease{client: c, name: name}, nil
	default:
		return nil, fmt.Errorf("etcd has no lock that is called %s", run.Lock)
	}
}

func (c *client) Close() {
	_ = c.session.Close()
	_ = c.client.Close()
}

// Take starts a new session where the last one has ended.
func (l *lock) Take(ctx context.Context) error {
	if l.hasEnded() {
		if err := l.start(); err != nil {
			return err
		}
		l.mutex = concurrency.NewMutex(l.session, l.name)
	}
	return l.mutex.Lock(ctx)
}

func (l *lock) Give() error {
	if l.hasEnded() {
		return errors.New("the session has ended")
	}
	return l.mutex.Unlock(context.Background())
}

func (l *lock) IsHeld() bool { return !l.hasEnded() }

// Token is the store's revision at the grant.
func (l *lock) Token() int64 { return l.mutex.Header().Revision }

type lease struct {
	*client
	name  string
	id    clientv3.LeaseID
	ended atomic.Bool
}

// Take puts the key in one transaction if there is none.
func (l *lease) Take(ctx context.Context) error {
	granted, err := l.client.client.Grant(ctx, int64(l.ttl))
	if err != nil {
		return err
	}
	l.id = granted.ID
	isFree := clientv3.Compare(clientv3.CreateRevision(l.name), "=", 0)
	done, err := l.client.client.Txn(ctx).If(isFree).Then(clientv3.OpPut(l.name, "", clientv3.WithLease(l.id))).Commit()
	if err != nil {
		return err
	}
	if !done.Succeeded {
		return errors.New("the key exists")
	}
	answers, err := l.client.client.KeepAlive(context.Background(), l.id)
	if err != nil {
		return err
	}
	l.ended.Store(false)
	// The client closes the channel when the lease has ended or was not kept alive within its ttl.
	go func() {
		for range answers {
		}
		l.ended.Store(true)
	}()
	return nil
}

func (l *lease) Give() error {
	_, err := l.client.client.Revoke(context.Background(), l.id)
	return err
}

func (l *lease) IsHeld() bool { return !l.ended.Load() }
