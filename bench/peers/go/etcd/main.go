// etcd's lock as a peer: the mutex of its client's package concurrency, a session for each client.
package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"leasehold/bench/work"
)

type client struct {
	client  *clientv3.Client
	session *concurrency.Session
}

type lock struct {
	session *concurrency.Session
	mutex   *concurrency.Mutex
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
	session, err := concurrency.NewSession(connection, concurrency.WithTTL(int(order.TTLMillis/1000)))
	if err != nil {
		return nil, err
	}
	return &client{connection, session}, nil
}

// Lock is for one task of the client: to etcd all tasks of a session are the same holder.
func (c *client) Lock(run *work.Order, name string) (work.Lock, error) {
	if run.Lock != "mutex" {
		return nil, fmt.Errorf("etcd has no lock that is called %s", run.Lock)
	}
	return &lock{c.session, concurrency.NewMutex(c.session, "/bench/"+name)}, nil
}

func (c *client) Close() {
	_ = c.session.Close()
	_ = c.client.Close()
}

func (l *lock) Take(ctx context.Context) error { return l.mutex.Lock(ctx) }

func (l *lock) Give() error {
	select {
	case <-l.session.Done():
		return errors.New("the session has ended")
	default:
		return l.mutex.Unlock(context.Background())
	}
}

func (l *lock) IsHeld() bool {
	select {
	case <-l.session.Done():
		return false
	default:
		return true
	}
}

// Token is the store's revision at the grant.
func (l *lock) Token() int64 { return l.mutex.Header().Revision }
