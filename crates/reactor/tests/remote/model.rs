//! An NVMe/TCP target for tests: memory as a namespace, and everything that can go wrong.
//!
//! A thread for each connection. What it does wrong, and when, says [`Faults`].

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use ashlar_reactor::nvme::command::{
    Admin, CNS_ACTIVE_NAMESPACES, CNS_CONTROLLER, CNS_NAMESPACE, CNS_NAMESPACE_DESCRIPTORS,
    COMMAND_BYTES, Command, Completion, IDENTIFY_BYTES, Nvm, Sgl, Status,
};
use ashlar_reactor::nvme::fabrics::{
    self, ConnectData, DISCOVERY_NQN, DiscoveryEntry, DiscoveryHeader, Property, SUBTYPE_NVME,
    TRANSPORT_TCP, nqn_field, nqn_from, padded,
};
use ashlar_reactor::nvme::pdu::{
    self, CapsuleCmd, CapsuleResp, Common, Data, Digests, IcReq, IcResp, Kind, LAST, R2t, SUCCESS,
    Shape,
};
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_reactor::prng::Prng;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

pub const SUBSYSTEM: &str = "nqn.2026-01.test:model";
pub const NAMESPACE: u32 = 3;
pub const BLOCK: usize = 512;
/// Unless said otherwise.
pub const BYTES: usize = 4 << 20;
/// Data in a capsule, in bytes.
pub const CAPSULE: usize = 8192;

/// What it does wrong.
#[derive(Clone)]
pub struct Faults {
    /// Commands on connections for I/O after which one is cut, once, in the middle of its answer.
    pub cut_after: Option<u32>,
    /// A write on the connection that is cut was taken, and is done so much later.
    pub late_write: Option<Duration>,
    /// Data of the next write is asked for so late.
    pub late_r2t: Option<Duration>,
    /// Pieces that data is asked for, and sent, in.
    pub r2t_bytes: usize,
    pub data_bytes: usize,
    /// Data of no bytes is sent first, again and again.
    pub empty_data: bool,
    /// Reads are answered by their data alone.
    pub success_flag: bool,
    /// Several commands are taken before one is answered, and the last is answered first.
    pub reversed: bool,
    /// So many digests are wrong.
    pub wrong_data_digests: u32,
    pub wrong_header_digests: u32,
    /// So many answers name a command that is not out.
    pub wrong_ids: u32,
    /// So many reads succeed without their last block.
    pub short_reads: u32,
    /// The next controller that is asked something is silent from then on.
    pub silent_admin: bool,
    /// Nothing is answered on connections for I/O.
    pub silent_io: bool,
    /// It cannot be told to stop.
    pub no_reset: bool,
    /// Nobody can connect.
    pub closed: bool,
    /// One byte in so many that it sends for I/O is another.
    pub mutate: Option<(u64, u64)>,
    pub volatile_cache: bool,
    /// Zero: it does not say.
    pub power_cycle: [u8; 16],
    pub log2_pages_max: u8,
    /// Of the namespace, from the start.
    pub bytes: usize,
    /// The namespace's NGUID.
    pub nguid: [u8; 16],
    /// What it lets in; `None`: everybody.
    pub host: Option<String>,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            cut_after: None,
            late_write: None,
            late_r2t: None,
            r2t_bytes: usize::MAX,
            data_bytes: usize::MAX,
            empty_data: false,
            success_flag: false,
            reversed: false,
            wrong_data_digests: 0,
            wrong_header_digests: 0,
            wrong_ids: 0,
            short_reads: 0,
            silent_admin: false,
            silent_io: false,
            no_reset: false,
            closed: false,
            mutate: None,
            volatile_cache: false,
            power_cycle: [0; 16],
            log2_pages_max: 5,
            bytes: BYTES,
            nguid: [7; 16],
            host: None,
        }
    }
}

/// What it has done, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Connected { queue: u16 },
    Wrote { offset: usize, first: u8 },
    LateWrite { offset: usize, first: u8 },
    Flushed,
    Zeroed,
    KeptAlive,
}

pub struct Model {
    pub address: SocketAddr,
    /// Of its namespace: no other has it.
    pub uuid: [u8; 16],
    inner: Arc<Inner>,
}

struct Inner {
    uuid: [u8; 16],
    faults: Mutex<Faults>,
    disk: Mutex<Vec<u8>>,
    events: Mutex<Vec<Event>>,
    connections: Mutex<Vec<TcpStream>>,
    controllers: AtomicU16,
    /// Connections for I/O of each controller; who serves one holds its count.
    serving: Mutex<Vec<(u16, TcpStream, Weak<()>)>>,
    over: AtomicBool,
}

impl Model {
    pub fn start(faults: Faults) -> Model {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut uuid = [9; 16];
        uuid[..2].copy_from_slice(&address.port().to_le_bytes());
        let inner = Arc::new(Inner {
            uuid,
            disk: Mutex::new(vec![0; faults.bytes]),
            faults: Mutex::new(faults),
            events: Mutex::default(),
            connections: Mutex::default(),
            controllers: AtomicU16::new(1),
            serving: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let its = inner.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                if its.over.load(Ordering::Relaxed) {
                    return;
                }
                if its.faults().closed {
                    continue;
                }
                let inner = its.clone();
                its.connections.lock().unwrap().push(stream.try_clone().unwrap());
                // It ends with its connection, in whatever way.
                std::thread::spawn(move || drop(Connection::new(stream, inner).serve()));
            }
        });
        Model { address, uuid, inner }
    }

    pub fn faults(&self) -> MutexGuard<'_, Faults> {
        self.inner.faults()
    }

    pub fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.inner.disk.lock().unwrap()
    }

    pub fn events(&self) -> Vec<Event> {
        self.inner.events.lock().unwrap().clone()
    }

    pub fn count(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        self.events().iter().filter(|event| wanted(event)).count()
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        for stream in self.inner.connections.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        self.cut();
    }
}

impl Inner {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }

    /// Ends what a controller does; nothing of it is done after that.
    fn reset(&self, controller: u16) {
        let mut serving = self.serving.lock().unwrap();
        for (_, stream, served) in serving.extract_if(.., |its| its.0 == controller) {
            let _ = stream.shutdown(Shutdown::Both);
            while served.upgrade().is_some() {
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    }

    fn note(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }

    /// Counts one of these down; true: there was one.
    fn take(&self, which: impl Fn(&mut Faults) -> &mut u32) -> bool {
        let mut faults = self.faults();
        let left = which(&mut faults);
        let is_one = *left > 0;
        *left -= u32::from(is_one);
        is_one
    }
}

/// Its end: nobody needs to know why.
#[derive(Debug)]
struct Over;

impl From<std::io::Error> for Over {
    fn from(_: std::io::Error) -> Over {
        Over
    }
}

struct Connection {
    stream: TcpStream,
    inner: Arc<Inner>,
    digests: Digests,
    /// `None`: not connected yet.
    queue: Option<u16>,
    controller: u16,
    /// As long as it serves.
    alive: Arc<()>,
    is_discovery: bool,
    ready: bool,
    is_silent: bool,
    /// Commands with the data of their capsules that wait.
    waiting: VecDeque<(Command, Vec<u8>)>,
    prng: Option<(Prng, u64)>,
}

impl Connection {
    fn new(stream: TcpStream, inner: Arc<Inner>) -> Connection {
        Connection {
            stream,
            inner,
            digests: Digests::default(),
            queue: None,
            controller: 0,
            alive: Arc::new(()),
            is_discovery: false,
            ready: false,
            is_silent: false,
            waiting: VecDeque::new(),
            prng: None,
        }
    }

    fn serve(mut self) -> Result<(), Over> {
        self.stream.set_nodelay(true)?;
        let mut first = [0; pdu::HEADER_BYTES_MAX];
        self.stream.read_exact(&mut first)?;
        let theirs = pdu::header::<IcReq>(&first).ok_or(Over)?;
        self.digests = Digests::from_byte(theirs.digests);
        let ours = IcResp {
            common: Shape::new(Kind::IcResp, 0, 0, Digests::default()).common(0),
            version: U16::new(0),
            alignment: 0,
            digests: theirs.digests,
            h2c_data_bytes_max: U32::new(16 << 10),
            reserved: [0; 112],
        };
        self.stream.write_all(ours.as_bytes())?;
        loop {
            let (command, data) = self.next()?;
            let is_io = self.queue.is_some_and(|queue| queue > 0);
            let faults = self.inner.faults().clone();
            if !is_io && self.ready && faults.silent_admin {
                (self.is_silent, self.inner.faults().silent_admin) = (true, false);
            }
            if if is_io { faults.silent_io } else { self.is_silent } {
                continue;
            }
            match is_io {
                true => self.io(&command, &data)?,
                false => self.admin(&command, &data)?,
            }
        }
    }

    /// The next command. Reversed: the last of those that come together.
    fn next(&mut self) -> Result<(Command, Vec<u8>), Over> {
        if self.waiting.is_empty() {
            let next = self.receive_command()?;
            self.waiting.push_back(next);
        }
        if self.inner.faults().reversed && self.queue.is_some_and(|queue| queue > 0) {
            let mut byte = [0];
            self.stream.set_read_timeout(Some(Duration::from_millis(1)))?;
            while self.stream.peek(&mut byte).is_ok_and(|count| count > 0) {
                self.stream.set_read_timeout(None)?;
                let next = self.receive_command()?;
                self.waiting.push_back(next);
                self.stream.set_read_timeout(Some(Duration::from_millis(1)))?;
            }
            self.stream.set_read_timeout(None)?;
            return self.waiting.pop_back().ok_or(Over);
        }
        self.waiting.pop_front().ok_or(Over)
    }

    fn receive_command(&mut self) -> Result<(Command, Vec<u8>), Over> {
        let (shape, head, data) = self.receive()?;
        if shape.kind != Kind::CapsuleCmd {
            return Err(Over);
        }
        let its = pdu::header::<CapsuleCmd>(&head).ok_or(Over)?;
        Ok((Command::from_bytes(&its.command), data))
    }

    fn receive(&mut self) -> Result<(Shape, Vec<u8>, Vec<u8>), Over> {
        let mut head = vec![0; pdu::COMMON_BYTES];
        self.stream.read_exact(&mut head)?;
        let common = pdu::header::<Common>(&head).ok_or(Over)?;
        let shape = Shape::read(&common, self.digests).map_err(|_| Over)?;
        head.resize(shape.data_at, 0);
        self.stream.read_exact(&mut head[pdu::COMMON_BYTES..])?;
        shape.check_head(&head).map_err(|_| Over)?;
        let mut data = vec![0; shape.data_bytes];
        self.stream.read_exact(&mut data)?;
        if shape.data_digest {
            let mut found = [0; pdu::DIGEST_BYTES];
            self.stream.read_exact(&mut found)?;
            assert_eq!(pdu::crc32c(&data), u32::from_le_bytes(found), "a host's digest");
        }
        Ok((shape, head, data))
    }

    fn send<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        kind: Kind,
        flags: u8,
        data: &[u8],
        header: impl FnOnce(Common) -> T,
    ) -> Result<(), Over> {
        let shape = Shape::new(kind, data.len(), 0, self.digests);
        let mut bytes = vec![0; shape.data_at];
        shape.write_head(&header(shape.common(flags)), &mut bytes);
        bytes.extend_from_slice(data);
        if shape.data_digest {
            let wrong = self.is_io() && self.inner.take(|its| &mut its.wrong_data_digests);
            let digest = pdu::crc32c(data) ^ u32::from(wrong);
            bytes.extend_from_slice(&digest.to_le_bytes());
        }
        if shape.header_digest
            && self.is_io()
            && self.inner.take(|its| &mut its.wrong_header_digests)
        {
            bytes[shape.header_bytes] ^= 1;
        }
        if let Some((prng, one_in)) = &mut self.prng {
            for byte in &mut bytes {
                if prng.chance(1, *one_in) {
                    *byte = prng.below(256) as u8;
                }
            }
        }
        Ok(self.stream.write_all(&bytes)?)
    }

    fn is_io(&self) -> bool {
        self.queue.is_some_and(|queue| queue > 0)
    }

    fn answer(&mut self, id: u16, status: Status, result: u64) -> Result<(), Over> {
        let wrong = self.is_io() && self.inner.take(|its| &mut its.wrong_ids);
        let completion = Completion {
            result: result as u32,
            result_high: (result >> 32) as u32,
            submission_head: 0,
            queue: self.queue.unwrap_or(0),
            id: if wrong { id ^ 0x4000 } else { id },
            phase: false,
            status,
        };
        self.send(Kind::CapsuleResp, 0, &[], |common| CapsuleResp {
            common,
            completion: completion.to_bytes(),
        })
    }

    fn send_data(&mut self, id: u16, data: &[u8], flags: u8) -> Result<(), Over> {
        while self.inner.faults().empty_data {
            self.send_part(id, 0, &[], 0)?;
        }
        let most = self.inner.faults().data_bytes.min(data.len());
        for (i, part) in data.chunks(most).enumerate() {
            let at = i * most;
            let flags = if at + part.len() == data.len() { LAST | flags } else { 0 };
            self.send_part(id, at, part, flags)?;
        }
        Ok(())
    }

    fn send_part(&mut self, id: u16, at: usize, part: &[u8], flags: u8) -> Result<(), Over> {
        self.send(Kind::C2hData, flags, part, |common| Data {
            common,
            command: U16::new(id),
            tag: U16::new(0),
            offset: U32::new(at as u32),
            len: U32::new(part.len() as u32),
            reserved: [0; 4],
        })
    }

    fn connect(&mut self, command: &Command, data: &[u8]) -> Result<(), Over> {
        let asked = fabrics::Connect::from_command(command).ok_or(Over)?;
        let its = ConnectData::read_from_bytes(data).map_err(|_| Over)?;
        let subsystem = nqn_from(&its.subsystem).ok_or(Over)?;
        let host = nqn_from(&its.host).ok_or(Over)?;
        let wanted = self.inner.faults().host.clone();
        self.is_discovery = subsystem == DISCOVERY_NQN;
        if !self.is_discovery && subsystem != SUBSYSTEM {
            return self.answer(command.id(), Status::CONNECT_INVALID, 0);
        }
        if wanted.is_some_and(|wanted| wanted != host) {
            return self.answer(command.id(), Status::CONNECT_HOST, 0);
        }
        let controller = match asked.queue {
            0 => self.inner.controllers.fetch_add(1, Ordering::Relaxed),
            _ => its.controller.get(),
        };
        self.controller = controller;
        if asked.queue > 0 {
            let served = (controller, self.stream.try_clone()?, Arc::downgrade(&self.alive));
            self.inner.serving.lock().unwrap().push(served);
        }
        self.inner.note(Event::Connected { queue: asked.queue });
        // What it does wrong it does from the next on.
        self.answer(command.id(), Status::SUCCESS, u64::from(controller))?;
        self.queue = Some(asked.queue);
        if asked.queue > 0 {
            let mutate = self.inner.faults().mutate;
            self.prng = mutate.map(|(seed, one_in)| (Prng::from_seed(seed), one_in));
        }
        Ok(())
    }

    fn admin(&mut self, command: &Command, data: &[u8]) -> Result<(), Over> {
        let id = command.id();
        if command.opcode() == fabrics::OPCODE {
            let property = fabrics::property_of(command);
            return match (fabrics::Kind::of(command), property) {
                (Some(fabrics::Kind::Connect), _) => self.connect(command, data),
                // 128 entries, ready within 500 ms.
                (Some(fabrics::Kind::PropertyGet), Some(Property::Capabilities)) => {
                    self.answer(id, Status::SUCCESS, 127 | 1 << 24)
                }
                (Some(fabrics::Kind::PropertyGet), Some(Property::Status)) => {
                    self.answer(id, Status::SUCCESS, u64::from(self.ready))
                }
                (Some(fabrics::Kind::PropertySet), Some(Property::Configuration)) => {
                    self.ready = command.dwords[12] & 1 != 0;
                    if !self.ready && self.inner.faults().no_reset {
                        return Ok(());
                    }
                    if !self.ready {
                        self.inner.reset(self.controller);
                    }
                    self.answer(id, Status::SUCCESS, 0)
                }
                _ => self.answer(id, Status::INVALID_FIELD, 0),
            };
        }
        let Some(Sgl::Transport { bytes }) = command.sgl() else { return Err(Over) };
        match Admin::from_byte(command.opcode()) {
            Some(Admin::Identify) => {
                let page = self.identify(command.dwords[10] & 0xff, command.namespace());
                self.send_data(id, &page, 0)?;
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(Admin::GetLogPage) => {
                let log = discovery_log();
                let (from, len) = (command.quad(12) as usize, bytes as usize);
                assert!(len <= 4096, "more at once than this one gives");
                self.send_data(id, &log[from..from + len], 0)?;
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(Admin::SetFeatures) => self.answer(id, Status::SUCCESS, 0),
            Some(Admin::KeepAlive) => {
                self.inner.note(Event::KeptAlive);
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(
                Admin::DeleteSubmissionQueue
                | Admin::CreateSubmissionQueue
                | Admin::DeleteCompletionQueue
                | Admin::CreateCompletionQueue
                | Admin::Abort
                | Admin::GetFeatures
                | Admin::AsyncEvent,
            )
            | None => self.answer(id, Status::INVALID_OPCODE, 0),
        }
    }

    fn identify(&self, which: u32, namespace: u32) -> Vec<u8> {
        let faults = self.inner.faults();
        let mut page = vec![0; IDENTIFY_BYTES];
        match which {
            CNS_CONTROLLER => {
                page[4..24].copy_from_slice(&padded::<20>("SERIAL"));
                page[24..64].copy_from_slice(&padded::<40>("Model of the tests"));
                page[77] = faults.log2_pages_max;
                page[320] = 1; // KAS: 100 ms
                page[520] = 1 << 3; // write zeroes
                page[525] = u8::from(faults.volatile_cache);
                let units = (COMMAND_BYTES + CAPSULE) / 16;
                page[1792..1796].copy_from_slice(&(units as u32).to_le_bytes());
            }
            CNS_ACTIVE_NAMESPACES => {
                page[..4].copy_from_slice(&1u32.to_le_bytes());
                page[4..8].copy_from_slice(&NAMESPACE.to_le_bytes());
            }
            CNS_NAMESPACE if namespace == NAMESPACE => {
                page[..8].copy_from_slice(&((faults.bytes / BLOCK) as u64).to_le_bytes());
                page[33] = 1 | 1 << 3;
                page[104..120].copy_from_slice(&faults.nguid);
                page[130] = 9;
                if let Some(power) = PowerCycle::new(faults.power_cycle) {
                    power.write(page.as_mut_slice().try_into().unwrap());
                }
            }
            CNS_NAMESPACE_DESCRIPTORS => {
                page[..2].copy_from_slice(&[3, 16]);
                page[4..20].copy_from_slice(&self.inner.uuid);
            }
            _ => {}
        }
        page
    }

    fn io(&mut self, command: &Command, data: &[u8]) -> Result<(), Over> {
        let id = command.id();
        if self.must_cut() {
            self.cut(command, data)?;
            return Err(Over);
        }
        let (offset, len) = (command.quad(10) as usize * BLOCK, command.blocks() as usize * BLOCK);
        match Nvm::from_byte(command.opcode()) {
            Some(Nvm::Read) => {
                let mut bytes = self.inner.disk.lock().unwrap()[offset..offset + len].to_vec();
                if self.inner.take(|its| &mut its.short_reads) {
                    bytes.truncate(len - BLOCK);
                    if bytes.is_empty() {
                        return self.answer(id, Status::SUCCESS, 0);
                    }
                }
                if self.inner.faults().success_flag {
                    return self.send_data(id, &bytes, SUCCESS);
                }
                self.send_data(id, &bytes, 0)?;
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(Nvm::Write) => {
                let bytes = self.data_of(command, data, len)?;
                self.inner.disk.lock().unwrap()[offset..offset + len].copy_from_slice(&bytes);
                self.inner.note(Event::Wrote { offset, first: bytes[0] });
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(Nvm::WriteZeroes) => {
                self.inner.disk.lock().unwrap()[offset..offset + len].fill(0);
                self.inner.note(Event::Zeroed);
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(Nvm::Flush) => {
                self.inner.note(Event::Flushed);
                self.answer(id, Status::SUCCESS, 0)
            }
            Some(Nvm::Compare | Nvm::DatasetManagement) | None => {
                self.answer(id, Status::INVALID_OPCODE, 0)
            }
        }
    }

    fn must_cut(&self) -> bool {
        let mut faults = self.inner.faults();
        let Some(left) = &mut faults.cut_after else { return false };
        if *left > 0 {
            *left -= 1;
            return false;
        }
        faults.cut_after = None;
        true
    }

    /// Ends in the middle of an answer. A write may be done all the same, later.
    fn cut(&mut self, command: &Command, data: &[u8]) -> Result<(), Over> {
        let late = self.inner.faults().late_write;
        if let Some(late) = late.filter(|_| command.opcode() == Nvm::Write as u8) {
            let (offset, len) =
                (command.quad(10) as usize * BLOCK, command.blocks() as usize * BLOCK);
            let bytes = self.data_of(command, data, len)?;
            let inner = self.inner.clone();
            std::thread::spawn(move || {
                std::thread::park_timeout(late);
                inner.disk.lock().unwrap()[offset..offset + len].copy_from_slice(&bytes);
                inner.note(Event::LateWrite { offset, first: bytes[0] });
            });
        }
        self.stream.write_all(&[Kind::CapsuleResp as u8, 0, 24])?;
        let _ = self.stream.shutdown(Shutdown::Both);
        Ok(())
    }

    /// The data of a write: from its capsule, or as it is asked for.
    fn data_of(&mut self, command: &Command, data: &[u8], len: usize) -> Result<Vec<u8>, Over> {
        match command.sgl() {
            Some(Sgl::InCapsule { offset: 0, bytes }) => {
                assert_eq!((bytes as usize, data.len()), (len, len));
                return Ok(data.to_vec());
            }
            Some(Sgl::Transport { bytes }) => assert_eq!(bytes as usize, len),
            Some(Sgl::InCapsule { .. }) | None => return Err(Over),
        }
        let late = self.inner.faults().late_r2t.take();
        late.into_iter().for_each(std::thread::park_timeout);
        let most = self.inner.faults().r2t_bytes.min(len);
        let mut bytes = vec![0; len];
        for (i, part) in bytes.chunks_mut(most).enumerate() {
            let (tag, at) = (i as u16 + 100, i * most);
            self.send(Kind::R2t, 0, &[], |common| R2t {
                common,
                command: U16::new(command.id()),
                tag: U16::new(tag),
                offset: U32::new(at as u32),
                len: U32::new(part.len() as u32),
                reserved: [0; 4],
            })?;
            let mut got = 0;
            while got < part.len() {
                let (shape, head, data) = self.receive()?;
                if shape.kind == Kind::CapsuleCmd {
                    let its = pdu::header::<CapsuleCmd>(&head).ok_or(Over)?;
                    self.waiting.push_back((Command::from_bytes(&its.command), data));
                    continue;
                }
                assert_eq!(shape.kind, Kind::H2cData);
                let its = pdu::header::<Data>(&head).ok_or(Over)?;
                assert_eq!((its.command.get(), its.tag.get()), (command.id(), tag));
                assert_eq!(its.offset.get() as usize, at + got);
                assert!(data.len() <= 16 << 10, "more than MAXH2CDATA");
                part[got..got + data.len()].copy_from_slice(&data);
                got += data.len();
                let common = pdu::header::<Common>(&head).ok_or(Over)?;
                assert_eq!(common.flags & LAST != 0, got == part.len());
            }
        }
        Ok(bytes)
    }
}

/// This subsystem, behind some that are reached in another way.
fn discovery_log() -> Vec<u8> {
    let header = DiscoveryHeader {
        generation: U64::new(1),
        entries: U64::new(7),
        format: U16::new(0),
        reserved: [0; 1006],
    };
    let entry = |transport, subsystem| DiscoveryEntry {
        transport,
        family: 1,
        subtype: SUBTYPE_NVME,
        requirements: 0,
        port: U16::new(1),
        controller: U16::new(0xffff),
        admin_entries_max: U16::new(32),
        flags: U16::new(0),
        reserved_a: [0; 20],
        service: padded("4420"),
        reserved_b: [0; 192],
        subsystem: nqn_field(subsystem).unwrap(),
        address: padded("192.0.2.1"),
        specific: [0; 256],
    };
    let mut log = header.as_bytes().to_vec();
    let other = entry(1, "nqn.2026-01.test:other");
    (0..6).for_each(|_| log.extend_from_slice(other.as_bytes()));
    log.extend_from_slice(entry(TRANSPORT_TCP, SUBSYSTEM).as_bytes());
    log
}
