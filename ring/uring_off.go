//go:build !uring

package ring

import "errors"

var errNotBuilt = errors.New("this program was built without the uring tag (build with -tags=uring -ldflags=-checklinkname=0)")

type uringOptions struct{}

func newUring(*Options, *Ring) (backend, error) { return nil, errNotBuilt }
