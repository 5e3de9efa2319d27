//! Goal: bytes pass a socket whole and in order, also when they come in pieces, and both sides
//! hear of its end.
//! Method: a Unix and a TCP connection; the other side is an ordinary thread.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Errno;
use ashlar_reactor::socket::{CUT_OFF, Socket};
use ashlar_reactor::uring::UringBackend;

const BYTES: usize = 3 << 20;
/// A prime: pieces end anywhere.
const PIECE: usize = 7919;

fn reactor() -> Reactor {
    Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo)
}

fn content() -> Vec<u8> {
    (0..BYTES).map(|at| (at / 3 + at) as u8).collect()
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Memory in three pieces of different sizes.
fn memory(reactor: &Reactor) -> Buffers {
    let mut memory = Buffers::from(reactor.buffer(1 << 20));
    memory.push(reactor.buffer((1 << 20) - 100));
    memory.push(reactor.buffer((1 << 20) - 4096));
    memory
}

fn to_and_fro(near: impl Into<OwnedFd>, mut far: impl Read + Write + Send + 'static) {
    let reactor = reactor();
    let far: JoinHandle<Vec<u8>> = std::thread::spawn(move || {
        for piece in content()[..memory_len()].chunks(PIECE) {
            far.write_all(piece).unwrap();
        }
        let mut back = vec![0; memory_len()];
        far.read_exact(&mut back).unwrap();
        back
    });
    let (socket, into) = (Socket::new(&reactor, near).unwrap(), memory(&reactor));
    let seen = into.clone();
    let done = reactor.block_on(async move {
        socket.receive_all(&into).await?;
        socket.send(&into).await
    });
    assert_eq!(done, Some(Ok(())));
    let mut came = vec![0; memory_len()];
    seen.copy_to_slice(&mut came);
    assert!(came == content()[..memory_len()]);
    assert!(far.join().unwrap() == content()[..memory_len()]);
}

fn memory_len() -> usize {
    (3 << 20) - 4196
}

#[test]
fn what_is_sent_comes_back() {
    let (near, far) = UnixStream::pair().unwrap();
    // One that must not block is waited for all the same.
    near.set_nonblocking(true).unwrap();
    to_and_fro(near, far);
    let (near, far) = tcp();
    to_and_fro(near, far);
}

#[test]
fn the_end_of_the_other_side_is_heard() {
    let (reactor, (near, mut far)) = (reactor(), tcp());
    far.write_all(&[7; 100]).unwrap();
    drop(far);
    let (socket, into) = (Socket::new(&reactor, near).unwrap(), reactor.buffer(4096));
    let heard = reactor.block_on(async move {
        let into = Buffers::from(into);
        let whole = socket.receive_all(&into).await;
        (whole, socket.receive(into).await)
    });
    assert_eq!(heard, Some((Err(CUT_OFF), Ok(0))));
}

#[test]
fn sending_to_nobody_is_an_error_and_no_signal() {
    let (reactor, (near, far)) = (reactor(), UnixStream::pair().unwrap());
    drop(far);
    let (socket, from) = (Socket::new(&reactor, near).unwrap(), reactor.buffer(4096));
    let sent = reactor.block_on(async move { socket.send(&Buffers::from(from)).await });
    assert_eq!(sent, Some(Err(Errno(libc::EPIPE))));
}

#[test]
fn dropping_it_ends_what_is_under_way() {
    let (reactor, (near, mut far)) = (reactor(), tcp());
    let (socket, memory) = (Socket::new(&reactor, near).unwrap(), reactor.buffer(4096));
    let (also, into) = (reactor.clone(), Buffers::from(memory));
    let left = into.clone();
    let received = reactor.block_on(async move {
        // Nobody waits for it any more when the socket goes.
        let mut receiving = Box::pin(socket.receive(into.clone()));
        assert!(
            std::future::poll_fn(|context| {
                std::task::Poll::Ready(receiving.as_mut().poll(context))
            })
            .await
            .is_pending()
        );
        drop(receiving);
        drop(socket);
        also.reclaim(&into).await;
    });
    assert_eq!(received, Some(()));
    drop(left);
    assert_eq!(far.read(&mut [0; 1]).unwrap(), 0);
}
