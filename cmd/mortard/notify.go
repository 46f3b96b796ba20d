package main

import (
	"fmt"
	"net"
	"os"
)

// notifySocket names the socket on which systemd waits for news of a service of Type=notify (sd_notify(3)).
const notifySocket = "NOTIFY_SOCKET"

// States that systemd knows.
const (
	stateReady    = "READY=1"
	stateStopping = "STOPPING=1"
)

// notify tells the service manager, if there is one, what state the broker is in.
func notify(state string) error {
	name := os.Getenv(notifySocket)
	if name == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Net: "unixgram", Name: name}) // a leading @ is an abstract name
	if err != nil {
		return fmt.Errorf("telling systemd %s: %w", state, err)
	}
	_, err = conn.Write([]byte(state))
	_ = conn.Close() // a datagram is on its way or not
	if err != nil {
		return fmt.Errorf("telling systemd %s: %w", state, err)
	}
	return nil
}
