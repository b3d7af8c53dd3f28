package work

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// Fenced is a lock that gives out tokens.
type Fenced interface {
	// Token is that of the lock which was just taken.
	Token() int64
}

// contender is one task that takes a lock again and again, and reports every section to the resource.
type contender struct {
	*Order
	lock   Lock
	task   int64
	stream net.Conn
	lines  *bufio.Reader
}

func (p *peer) contend(order *Order) error {
	ended := make(chan error, order.Tasks)
	for number := range order.Tasks {
		lock, err := p.clients[number%len(p.clients)].Lock(order, order.Name)
		if err != nil {
			return err
		}
		stream, err := net.Dial("unix", order.Resource)
		if err != nil {
			return err
		}
		task := int64(order.FirstTask + number)
		c := &contender{order, lock, task, stream, bufio.NewReader(stream)}
		go func() { ended <- c.run() }()
	}
	for range order.Tasks {
		if err := <-ended; err != nil {
			return err
		}
	}
	return nil
}

func (c *contender) tell(event string, moment int64, rest any) error {
	line := strings.ReplaceAll(fmt.Sprint(event, " ", moment, " ", rest), "\n", " ")
	_, err := fmt.Fprintln(c.stream, strings.TrimSpace(line))
	return err
}

// ask waits for the resource to have processed the line.
func (c *contender) ask(event string, moment int64) error {
	var token int64
	if fenced, ok := c.lock.(Fenced); ok {
		token = fenced.Token()
	}
	if err := c.tell(event, moment, token); err != nil {
		return err
	}
	_, err := c.lines.ReadString('\n')
	return err
}

func (c *contender) run() error {
	defer c.stream.Close()
	if _, err := fmt.Fprintln(c.stream, "worker", c.task, os.Getpid()); err != nil {
		return err
	}
	for number := int64(0); now() < c.EndNanos; number++ {
		part := func(a, b int64) int64 { return (number*a + c.task*b + c.Seed) % 100 }
		hold := c.HoldMicros * (part(37, 61) + 1) / 100
		if part(41, 53) < c.LongPercent {
			hold = c.LongMicros
		}
		if err := c.tell("want", now(), ""); err != nil {
			return err
		}
		for err := c.lock.Take(context.Background()); err != nil; err = c.lock.Take(context.Background()) {
			_ = c.tell("fail", now(), err)
			time.Sleep(5 * time.Millisecond)
		}
		if err := c.section(hold); err != nil {
			return err
		}
		_ = c.tell("leave", now(), "")
		if err := c.lock.Give(); err != nil {
			_ = c.tell("kept", now(), err)
		} else {
			_ = c.tell("done", now(), "")
		}
		time.Sleep(time.Duration(c.HoldMicros*part(29, 17)/100) * time.Microsecond)
	}
	return c.tell("end", now(), "")
}

// section works while the library reports the lock as held, then writes. A reported time is always from before the check.
func (c *contender) section(left int64) error {
	moment := now()
	if !c.lock.IsHeld() {
		return c.tell("lost", now(), "")
	}
	if err := c.ask("begin", moment); err != nil {
		return err
	}
	for left > 0 {
		step := min(left, c.StepMicros)
		time.Sleep(time.Duration(step) * time.Microsecond)
		left -= step
		moment = now()
		if !c.lock.IsHeld() {
			return c.tell("lost", now(), "")
		}
		if err := c.tell("held", moment, ""); err != nil {
			return err
		}
	}
	// The lock was checked, and the write is on its way.
	time.Sleep(time.Duration(c.WriteMicros) * time.Microsecond)
	return c.ask("write", moment)
}
