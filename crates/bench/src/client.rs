//! A vhost-user-blk initiator: the driver's side of the rings, in memory that the back end maps.
//!
//! It polls, so the back end never has to call it, and it kicks only when the back end asks. It
//! makes no allocation and no system call for a request.

mod memory;
mod slots;
mod parts;
mod split;
mod packed;
mod ring;
mod socket;
mod queue;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clock::Clock;
use crate::error::BenchError;
use crate::run::Run;

pub use ring::RingKind;

use memory::Memory;
use queue::Queue;
use slots::SlotShape;
use socket::{Connection, Region};

/// Looks without a completion after which others may run: the back end may be on this very CPU.
const LOOKS_BEFORE_YIELD: u32 = 1 << 12;
/// Looks without a completion after which the connection is looked at, too.
const LOOKS_BEFORE_DOUBT: u32 = 1 << 16;
/// Longer than any back end needs that is only slow.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Between tries to reach a back end that went away.
const RECONNECT_EVERY: Duration = Duration::from_millis(2);

/// How requests are put to a back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    pub ring: RingKind,
    /// Each chain in a table of its own, and one descriptor in the ring; else all in the ring.
    pub indirect: bool,
    pub event_index: bool,
    pub queues: u16,
    /// Requests under way in each queue.
    pub depth: u16,
    pub block_bytes: u32,
    /// Pieces of memory that a request's data is in.
    pub segments: u16,
    pub writes: bool,
    /// What is in flight is kept in memory of ours, and a back end that went away may come back
    /// within this time.
    pub resume: Option<Duration>,
}

/// What a run has seen of back ends that came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    pub times: u32,
    /// The longest time from the last answer of one to the first of the next.
    pub gap_max: Duration,
}

/// A connection to a back end, with all its queues at work.
pub struct Client {
    socket: PathBuf,
    wish: Wish,
    connection: Connection,
    memory: Memory,
    /// Where the back end keeps what is in flight.
    region: Option<Region>,
    queues: Vec<Queue>,
    in_flight: u32,
    resumed: Resumed,
    /// The back end came back, and has not answered since.
    came_back: bool,
}

impl Client {
    /// Negotiates what is wished for, or says what the back end does not have.
    pub fn connect(socket: &Path, wish: &Wish) -> Result<Client, BenchError> {
        check(wish)?;
        let mut connection = Connection::open(socket, wish)?;
        let shape = SlotShape::new(wish);
        let places = queue::places(wish, &shape);
        let memory = Memory::new(places.end).map_err(BenchError::system("no shared memory"))?;
        let starts = places.starts;
        let queues = starts.into_iter().map(|start| Queue::new(&memory, wish, shape, start));
        let queues = queues.collect::<Result<Vec<_>, _>>()?;
        let region = wish.resume.map(|_| connection.region(ring::size(wish))).transpose()?;
        let mut client = Client {
            socket: socket.to_owned(),
            wish: *wish,
            connection,
            memory,
            region,
            queues,
            in_flight: 0,
            resumed: Resumed::default(),
            came_back: false,
        };
        client.start()?;
        Ok(client)
    }

    /// Sets all queues to work, for the first time or again.
    fn start(&mut self) -> Result<(), BenchError> {
        if let Some(region) = &self.region {
            self.connection.set_region(region)?;
        }
        self.connection.set_memory(&self.memory)?;
        for (index, queue) in self.queues.iter().enumerate() {
            self.connection.start(index, queue, &self.memory)?;
        }
        Ok(())
    }

    pub fn resumed(&self) -> Resumed {
        self.resumed
    }

    /// Of the disk, in bytes.
    pub fn capacity(&self) -> u64 {
        self.connection.capacity()
    }

    /// Whether the memory is of huge pages.
    pub fn has_huge_pages(&self) -> bool {
        self.memory.is_huge()
    }

    /// Makes requests until the round is over and all are answered.
    pub fn drive(&mut self, run: &mut Run, clock: Clock) -> Result<(), BenchError> {
        self.drive_beside(run, None, clock)
    }

    /// The same, while a neighbour makes its own requests from this thread: until this one's round
    /// is over, and all of both are answered.
    pub fn drive_beside(
        &mut self,
        run: &mut Run,
        mut neighbour: Option<(&mut Client, &mut Run)>,
        clock: Clock,
    ) -> Result<(), BenchError> {
        let (mut looks, mut last) = (0u32, clock.ticks());
        loop {
            let mut progress = self.turn(run)?;
            let mut at_rest = self.in_flight == 0 && run.is_over();
            if let Some((other, its)) = &mut neighbour {
                if run.is_over() {
                    its.stop();
                }
                progress |= other.turn(its)?;
                at_rest &= other.in_flight == 0;
            }
            if progress {
                if std::mem::take(&mut self.came_back) {
                    let gap = Duration::from_nanos(clock.ns(clock.ticks() - last));
                    self.resumed.gap_max = self.resumed.gap_max.max(gap);
                }
                looks = 0;
                continue;
            }
            if at_rest {
                return Ok(());
            }
            if looks == 0 {
                last = clock.ticks();
            }
            looks = looks.wrapping_add(1).max(1);
            if looks.is_multiple_of(LOOKS_BEFORE_DOUBT) {
                self.doubt(clock.ns(clock.ticks() - last))?;
            }
            if looks.is_multiple_of(LOOKS_BEFORE_YIELD) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    /// Looks at all queues once. False: nothing was answered, and nothing asked.
    #[inline]
    fn turn(&mut self, run: &mut Run) -> Result<bool, BenchError> {
        let mut progress = false;
        for queue in &mut self.queues {
            let answered = queue.collect(&self.memory, run)?;
            let made = queue.submit(&self.memory, run)?;
            progress |= answered + made > 0;
            self.in_flight = self.in_flight + u32::from(made) - u32::from(answered);
        }
        Ok(progress)
    }

    /// Nothing was answered for so long.
    fn doubt(&mut self, ns: u64) -> Result<(), BenchError> {
        let is_hung_up = self.connection.is_hung_up();
        if let Some(within) = self.wish.resume.filter(|_| is_hung_up) {
            return self.reconnect(within);
        }
        if is_hung_up {
            return Err(BenchError::back_end(
                format!("the back end hung up with {} requests under way", self.in_flight),
                "see its log; then start it again",
            ));
        }
        if u128::from(ns) < ANSWER_WITHIN.as_nanos() {
            return Ok(());
        }
        Err(BenchError::back_end(
            format!("{} requests were not answered for {ANSWER_WITHIN:?}", self.in_flight),
            "see the back end's log; a stopped queue answers nothing",
        ))
    }

    /// Tries until someone serves the socket again and has taken everything over.
    fn reconnect(&mut self, within: Duration) -> Result<(), BenchError> {
        let tries = within.as_millis() / RECONNECT_EVERY.as_millis();
        let mut failed = None;
        for _ in 0..=tries {
            let connected = Connection::open(&self.socket, &self.wish);
            let started = connected.and_then(|connection| {
                self.connection = connection;
                self.start()
            });
            let Err(error) = started else {
                (self.resumed.times, self.came_back) = (self.resumed.times + 1, true);
                return Ok(());
            };
            failed = Some(error);
            #[expect(clippy::disallowed_methods, reason = "the initiator's own thread")]
            std::thread::sleep(RECONNECT_EVERY);
        }
        let under_way = self.in_flight;
        let why = failed.map_or_else(String::new, |error| format!(": {error}"));
        let error = format!("the back end, with {under_way} requests, did not come back{why}");
        Err(BenchError::back_end(error, "start it again, or give it longer by --resume"))
    }

    /// Stops the queues; nothing is under way. A back end that has gone has stopped them, too,
    /// where one that goes is no error.
    pub fn close(mut self) -> Result<(), BenchError> {
        let stopped = (0..self.queues.len()).try_for_each(|index| self.connection.stop(index));
        let may_go = self.wish.resume.is_some();
        stopped.or_else(|error| match may_go && self.connection.is_hung_up() {
            true => Ok(()),
            false => Err(error),
        })
    }
}

/// Refuses what no back end could do.
fn check(wish: &Wish) -> Result<(), BenchError> {
    let Wish { queues, depth, block_bytes, segments, .. } = *wish;
    if queues == 0 || depth == 0 || segments == 0 {
        let error = "no queue, no depth or no segment: nothing would happen";
        return Err(BenchError::spec(error, "use --queues, --depth and --segments from 1"));
    }
    let pieces = u32::from(segments) * 512;
    if block_bytes == 0 || !block_bytes.is_multiple_of(pieces) {
        return Err(BenchError::spec(
            format!("{block_bytes} bytes cannot be in {segments} pieces of whole sectors"),
            "use a --block that is a multiple of --segments times 512",
        ));
    }
    let needed = ring::descriptors(wish);
    if needed > u32::from(ring::SIZE_MAX) {
        return Err(BenchError::spec(
            format!("a ring has room for {} descriptors, {needed} are wanted", ring::SIZE_MAX),
            "use --descriptors indirect, or a smaller --depth or --segments",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
