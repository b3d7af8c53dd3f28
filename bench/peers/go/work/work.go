// Package work is what both peers in Go share: the protocol of bench/peers/README.md, and the loop that acquires and releases.
package work

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Order is any order; each uses some of the fields.
type Order struct {
	Order           string   `json:"order"`
	URLs            []string `json:"urls"`
	Clients         int      `json:"clients"`
	TTLMillis       int64    `json:"ttl_ms"`
	Lock            string   `json:"lock"`
	IsTuned         bool     `json:"is_tuned"`
	Name            string   `json:"name"`
	OwnNames        bool     `json:"own_names"`
	Tasks           int      `json:"tasks"`
	FirstTask       int      `json:"first_task"`
	AllTasks        int      `json:"all_tasks"`
	HoldMicros      int64    `json:"hold_us"`
	StartNanos      int64    `json:"start_ns"`
	EndNanos        int64    `json:"end_ns"`
	MaxAcquisitions int      `json:"max_acquisitions"`
	ReadsPercent    int      `json:"reads_percent"`
	Permits         int      `json:"permits"`
	Counter         string   `json:"counter"`
	Log             string   `json:"log"`
	Count           int      `json:"count"`
	Resource        string   `json:"resource"`
	LongMicros      int64    `json:"long_us"`
	LongPercent     int64    `json:"long_percent"`
	WriteMicros     int64    `json:"write_us"`
	StepMicros      int64    `json:"step_us"`
	Seed            int64    `json:"seed"`
}

type answer struct {
	Error    string `json:"error,omitempty"`
	Failures int64  `json:"failures"`
	Failure  string `json:"failure,omitempty"`
	Held     int    `json:"held"`
	IsSpent  bool   `json:"is_spent"`
}

// TTL is what every lease is given.
func (o *Order) TTL() time.Duration { return time.Duration(o.TTLMillis) * time.Millisecond }

// Client is one client of the library, with connections of its own.
type Client interface {
	// Lock is one task's way to the lock of this name.
	Lock(run *Order, name string) (Lock, error)
	Close()
}

// Lock is what is taken and given back by one task.
type Lock interface {
	// Take waits for it until the context ends. Whatever it has by then is kept.
	Take(ctx context.Context) error
	Give() error
	IsHeld() bool
}

// Moments are counted on the machine's monotonic clock, which time.Since reads as well, and faster.
var (
	began      = time.Now()
	beganNanos = monotonic()
)

func monotonic() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return now.Nano()
}

func now() int64 { return beganNanos + int64(time.Since(began)) }

// Version is the version of a module that this program was built with.
func Version(module string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == module {
				return dependency.Version
			}
		}
	}
	return "unknown"
}

type peer struct {
	open    func(order *Order) (Client, error)
	clients []Client
	held    []Lock
}

// Serve carries out orders until there are no more.
func Serve(library string, open func(order *Order) (Client, error)) {
	out := json.NewEncoder(os.Stdout)
	_ = out.Encode(map[string]string{"library": library, "runtime": "Go " + runtime.Version()[2:]})
	lines := bufio.NewScanner(os.Stdin)
	p := &peer{open: open}
	for lines.Scan() {
		var order Order
		var told answer
		err := json.Unmarshal(lines.Bytes(), &order)
		if err == nil {
			err = p.obey(&order, &told)
		}
		if err != nil {
			told.Error = err.Error()
		}
		_ = out.Encode(told)
	}
}

func (p *peer) obey(order *Order, told *answer) error {
	switch order.Order {
	case "open":
		p.close()
		for range order.Clients {
			client, err := p.open(order)
			if err != nil {
				return err
			}
			p.clients = append(p.clients, client)
		}
	case "run":
		return p.run(order, told)
	case "hold":
		return p.hold(order)
	case "held":
		for _, lock := range p.held {
			if lock.IsHeld() {
				told.Held++
			}
		}
	case "contend":
		return p.contend(order)
	case "left":
	case "close":
		p.close()
	default:
		return fmt.Errorf("no order is called %q", order.Order)
	}
	return nil
}

func (p *peer) close() {
	for _, client := range p.clients {
		client.Close()
	}
	p.clients, p.held = nil, nil
}

func (p *peer) hold(order *Order) error {
	const atOnce = 64
	p.held = make([]Lock, order.Count)
	failed := make(chan error, order.Count)
	places := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for number := range order.Count {
		name := order.Name
		if order.Count > 1 {
			name = fmt.Sprintf("%s:%d", order.Name, number)
		}
		lock, err := p.clients[number%len(p.clients)].Lock(order, name)
		if err != nil {
			return err
		}
		p.held[number] = lock
		all.Add(1)
		places <- struct{}{}
		go func() {
			defer all.Done()
			if err := lock.Take(context.Background()); err != nil {
				failed <- err
			}
			<-places
		}()
	}
	all.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// course is what the tasks of one run share.
type course struct {
	*Order
	ctx      context.Context
	counter  *os.File
	failures atomic.Int64
	failure  atomic.Value
}

type acquisition struct {
	task, shared               uint32
	asked, entered, left, done int64
}

func (p *peer) run(order *Order, told *answer) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &course{Order: order, ctx: ctx}
	if order.Counter != "" {
		counter, err := os.OpenFile(order.Counter, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer counter.Close()
		c.counter = counter
	}
	acquisitions := make([][]acquisition, order.Tasks)
	var all sync.WaitGroup
	for number := range order.Tasks {
		name := order.Name
		if order.OwnNames {
			name = fmt.Sprintf("%s:%d", order.Name, number)
		}
		lock, err := p.clients[number%len(p.clients)].Lock(order, name)
		if err != nil {
			return err
		}
		all.Add(1)
		go func() {
			defer all.Done()
			acquisitions[number] = c.acquireRepeatedly(lock, order.FirstTask+number)
		}()
	}
	timer := time.AfterFunc(time.Duration(order.EndNanos-now()), cancel)
	defer timer.Stop()
	all.Wait()
	told.Failures = c.failures.Load()
	told.Failure, _ = c.failure.Load().(string)
	return write(order.Log, acquisitions)
}

func (c *course) acquireRepeatedly(lock Lock, task int) (acquisitions []acquisition) {
	time.Sleep(time.Duration(c.StartNanos - now()))
	for number := 0; now() < c.EndNanos && (c.MaxAcquisitions == 0 || number < c.MaxAcquisitions); {
		asked := now()
		if err := lock.Take(c.ctx); err != nil {
			if c.ctx.Err() != nil {
				return acquisitions
			}
			c.failed(err)
			continue
		}
		entered := now()
		c.work()
		left := now()
		if err := lock.Give(); err != nil {
			c.failed(err)
		}
		acquisitions = append(acquisitions, acquisition{uint32(task), 0, asked, entered, left, now()})
		number++
	}
	return acquisitions
}

// work is the critical section.
func (c *course) work() {
	var bytes [8]byte
	if c.counter != nil {
		_, _ = c.counter.ReadAt(bytes[:], 0)
	}
	if c.HoldMicros > 0 {
		time.Sleep(time.Duration(c.HoldMicros) * time.Microsecond)
	}
	if c.counter != nil {
		binary.LittleEndian.PutUint64(bytes[:], binary.LittleEndian.Uint64(bytes[:])+1)
		_, _ = c.counter.WriteAt(bytes[:], 0)
	}
}

func (c *course) failed(err error) {
	c.failures.Add(1)
	c.failure.CompareAndSwap(nil, err.Error())
	time.Sleep(time.Millisecond)
}

func write(path string, acquisitions [][]acquisition) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	out := bufio.NewWriter(file)
	for _, some := range acquisitions {
		for _, one := range some {
			if err := binary.Write(out, binary.LittleEndian, one.numbers()); err != nil {
				return err
			}
		}
	}
	return out.Flush()
}

func (a acquisition) numbers() []uint64 {
	return []uint64{uint64(a.task) | uint64(a.shared)<<32, uint64(a.asked), uint64(a.entered), uint64(a.left), uint64(a.done)}
}
