//! A client that sends what it is told to, right or wrong.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const FUA: u16 = 1;
pub const FAST_ZERO: u16 = 16;

pub const EXPORT_NAME: u32 = 1;
pub const GO: u32 = 7;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

pub enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

pub struct Client {
    stream: Stream,
    next_cookie: u64,
}

/// A simple reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub error: u32,
    pub data: Vec<u8>,
}

impl Client {
    /// Only connected.
    pub fn mute(path: &Path) -> Client {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client { stream: Stream::Unix(stream), next_cookie: 1 }
    }

    fn mute_tcp(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client { stream: Stream::Tcp(stream), next_cookie: 1 }
    }

    /// Has seen the greeting and said hello.
    pub fn polite(path: &Path) -> Client {
        let mut client = Client::mute(path);
        client.greet();
        client
    }

    /// Ready for requests, and the size that it was told.
    pub fn connect(path: &Path) -> (Client, u64) {
        Client::polite(path).enter()
    }

    pub fn connect_tcp(address: SocketAddr) -> (Client, u64) {
        let mut client = Client::mute_tcp(address);
        client.greet();
        client.enter()
    }

    fn greet(&mut self) {
        let greeting = self.receive(18);
        assert_eq!(greeting, b"NBDMAGICIHAVEOPT\0\x03");
        self.send(&3u32.to_be_bytes());
    }

    /// By EXPORT_NAME, without the zeroes.
    fn enter(mut self) -> (Client, u64) {
        self.option(EXPORT_NAME, b"disk");
        let told = self.receive(10);
        (self, u64::from_be_bytes(told[..8].try_into().unwrap()))
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        self.send(&[&option_head(option, len)[..], data].concat());
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).unwrap();
    }

    pub fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match &mut self.stream {
            Stream::Unix(stream) => stream.write_all(bytes),
            Stream::Tcp(stream) => stream.write_all(bytes),
        }
    }

    pub fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &mut self.stream {
            Stream::Unix(stream) => stream.read_exact(&mut bytes).unwrap(),
            Stream::Tcp(stream) => stream.read_exact(&mut bytes).unwrap(),
        }
        bytes
    }

    /// Whether the server closes the connection, after whatever it says before.
    pub fn is_cut_off(&mut self) -> bool {
        let mut rest = Vec::new();
        let read = match &mut self.stream {
            Stream::Unix(stream) => stream.read_to_end(&mut rest),
            Stream::Tcp(stream) => stream.read_to_end(&mut rest),
        };
        // A connection that is closed with something unread ends by a reset.
        read.map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |_| true)
    }

    /// Sends a request; its cookie.
    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.send(&[&request(command, flags, cookie, offset, len)[..], data].concat());
        cookie
    }

    /// The next reply: its cookie, and what it says. `len` tells how much a read has asked for.
    pub fn reply(&mut self, len: impl Fn(u64) -> usize) -> (u64, Reply) {
        let head = self.receive(16);
        assert_eq!(head[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
        let data = if error == 0 { self.receive(len(cookie)) } else { Vec::new() };
        (cookie, Reply { error, data })
    }

    /// The next good reply to a read of so many bytes; `None`: the connection has ended before
    /// it. Panics if it ends in the middle.
    pub fn next_reply(&mut self, len: usize) -> Option<u64> {
        let mut first = [0];
        let came = match &mut self.stream {
            Stream::Unix(stream) => stream.read(&mut first),
            Stream::Tcp(stream) => stream.read(&mut first),
        };
        if !came.is_ok_and(|bytes| bytes == 1) {
            return None;
        }
        let head = self.receive(15);
        assert_eq!((first[0], head[3..7].iter().sum()), (0x67, 0));
        self.receive(len);
        Some(u64::from_be_bytes(head[7..].try_into().unwrap()))
    }

    /// One request from beginning to end.
    fn done(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> Reply {
        let cookie = self.ask(command, flags, offset, len, data);
        let (answered, reply) = self.reply(|_| if command == READ { len as usize } else { 0 });
        assert_eq!(answered, cookie);
        reply
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Reply {
        self.done(READ, 0, offset, len, &[])
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.write_with(0, offset, data)
    }

    pub fn write_with(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.done(WRITE, flags, offset, u32::try_from(data.len()).unwrap(), data).error
    }

    pub fn command(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> u32 {
        self.done(command, flags, offset, len, &[]).error
    }
}

pub fn option_head(option: u32, len: u32) -> [u8; 16] {
    let mut head = [0; 16];
    head[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    head[8..12].copy_from_slice(&option.to_be_bytes());
    head[12..].copy_from_slice(&len.to_be_bytes());
    head
}

pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut head = [0; 28];
    head[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    head[4..6].copy_from_slice(&flags.to_be_bytes());
    head[6..8].copy_from_slice(&command.to_be_bytes());
    head[8..16].copy_from_slice(&cookie.to_be_bytes());
    head[16..24].copy_from_slice(&offset.to_be_bytes());
    head[24..].copy_from_slice(&len.to_be_bytes());
    head
}
