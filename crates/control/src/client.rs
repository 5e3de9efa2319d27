//! The command line's side of the API: one request a connection, over the daemon's socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::api::ErrorBody;
use crate::refusal::{Answer, Refusal};

/// Wait between two tries to reach a daemon that is starting.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// A daemon that is up and well needs less.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// A daemon, known by its socket.
pub struct Client {
    socket: PathBuf,
}

impl Client {
    pub fn new(socket: &Path) -> Client {
        Client { socket: socket.to_owned() }
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Answer<T> {
        self.request(Method::GET, path, Vec::new()).await
    }

    /// What is no JSON.
    pub async fn get_text(&self, path: &str) -> Answer<String> {
        let bytes = self.answer(Method::GET, path, Vec::new()).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Answer<T> {
        self.request(Method::DELETE, path, Vec::new()).await
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Answer<T> {
        let body = serde_json::to_vec(body)
            .map_err(|error| Refusal::invalid(format!("the request has no JSON form: {error}")))?;
        self.request(Method::POST, path, body).await
    }

    /// Waits until the daemon answers, at most `patience`.
    pub async fn wait_up(&self, patience: Duration) -> Answer<()> {
        let deadline = Instant::now() + patience;
        loop {
            let asked = self.get::<serde_json::Value>("/v1/status");
            // The last try has its moment, too.
            let until = deadline.max(Instant::now() + ANSWER_WITHIN);
            let answer = tokio::time::timeout_at(until, asked).await;
            let silent = |_| {
                Err(Refusal::failed(format!(
                    "the daemon at {} does not answer",
                    self.socket.display()
                ))
                .fix("its log says what it waits for, such as another host's lease"))
            };
            match answer.unwrap_or_else(silent) {
                Ok(_) => return Ok(()),
                Err(refusal) if Instant::now() >= deadline => return Err(refusal),
                Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
            }
        }
    }

    async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Answer<T> {
        let bytes = self.answer(method, path, body).await?;
        serde_json::from_slice(&bytes).map_err(|error| {
            Refusal::failed(format!("the daemon's answer is not understood: {error}"))
                .fix("use the `ashlar` of the same version as the daemon")
        })
    }

    async fn answer(&self, method: Method, path: &str, body: Vec<u8>) -> Answer<Bytes> {
        let stream =
            UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let broken = |error: hyper::Error| {
            Refusal::failed(format!("the daemon hung up: {error}")).fix("see the daemon's log")
        };
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // It ends with the connection; what is wrong with it is told by the request, too.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| Refusal::invalid(format!("no request can be made: {error}")))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        let bytes = response.into_body().collect().await.map_err(broken)?.to_bytes();
        if status.is_success() { Ok(bytes) } else { Err(refused(status.as_u16(), &bytes)) }
    }

    fn unreachable(&self, error: &io::Error) -> Refusal {
        let socket = self.socket.display();
        let elsewhere = "say where its socket is, by --socket or ASHLAR_SOCKET";
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ECONNREFUSED) => {
                Refusal::failed(format!("no daemon listens on {socket}"))
                    .fix(format!("start it: `ashlar serve --socket {socket}`; or {elsewhere}"))
            }
            Some(libc::EACCES | libc::EPERM) => {
                Refusal::failed(format!("the daemon on {socket} may not be reached: {error}"))
                    .fix(format!("run as the daemon's user; or {elsewhere}"))
            }
            _ => Refusal::failed(format!("{socket} cannot be reached: {error}")).fix(elsewhere),
        }
    }
}

fn refused(status: u16, bytes: &[u8]) -> Refusal {
    let body: ErrorBody = serde_json::from_slice(bytes).unwrap_or_else(|_| ErrorBody {
        error: format!("the daemon answered {status}: {}", String::from_utf8_lossy(bytes)),
        fix: None,
    });
    let mut refusal = Refusal::failed(body.error);
    refusal.fix = body.fix;
    refusal
}

/// `/v1/<noun>/<name>`, whatever is in the name.
pub fn path_of(noun: &str, name: &str) -> String {
    let mut path = format!("/v1/{noun}/");
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => path.push(char::from(byte)),
            // A name of dots only would be taken for a step up.
            b'.' if !name.trim_matches('.').is_empty() => path.push('.'),
            _ => path.push_str(&format!("%{byte:02X}")),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::path_of;

    #[test]
    fn no_name_leaves_its_place() {
        assert_eq!(path_of("drives", "nvme0n1.x"), "/v1/drives/nvme0n1.x");
        assert_eq!(path_of("volumes", "a/b"), "/v1/volumes/a%2Fb");
        assert_eq!(path_of("drives", "../x?y#z ä"), "/v1/drives/..%2Fx%3Fy%23z%20%C3%A4");
        assert_eq!(path_of("drives", ".."), "/v1/drives/%2E%2E");
    }
}
