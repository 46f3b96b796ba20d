package admin

import (
	"io"
	"net"

	"github.com/mortarmq/mortarmq/protocol"
)

// strayText is what a client of the broker is told that has connected to the admin port.
const strayText = "this is the broker's admin port, which speaks HTTP: connect to its client port (listen_client, 7188 by default)"

// strayListener notices clients of the broker that have mistaken the admin port for the client port. Without it they would
// wait for an answer to bytes that HTTP takes for the beginning of a very long line.
type strayListener struct{ net.Listener }

// Accept implements net.Listener.
func (l strayListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &strayConn{Conn: c}, nil
}

type strayConn struct {
	net.Conn
	known bool // it speaks HTTP
}

// Read implements net.Conn. A frame begins with the zero of its length, a request in HTTP with a letter.
func (c *strayConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.known || n == 0 {
		return n, err
	}
	if b[0] != 0 {
		c.known = true
		return n, err
	}
	// UNSUPPORTED_VERSION, because trying again does not help.
	refusal := protocol.AppendErr(nil, protocol.CodeUnsupportedVersion, protocol.OpConnect, strayText)
	_, _ = c.Conn.Write(refusal) // to whom it may concern: the connection is over either way
	return 0, io.EOF
}
