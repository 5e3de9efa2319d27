//! The API: HTTP and JSON on a Unix socket. Routes and the OpenAPI document come from one place.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::SocketAccess;
use crate::api::array::{
    Array, ArrayCreate, ArrayGrow, ArrayGrown, ArrayReplace, ArrayScrub, RebuildStarted, ScanResult,
};
use crate::api::drive::{Drive, DriveAttach};
use crate::api::export::{Export, ExportCreate, HostsChange, LimitsChange};
use crate::api::settings::SettingsChange;
use crate::api::spare::{Spare, SpareAdd};
use crate::api::status::Status;
use crate::api::upgrade::{UpgradeRequest, Upgrades};
use crate::api::volume::{Volume, VolumeCreate, VolumeResize};
use crate::api::{Done, ErrorBody, Force, On};
use crate::host::Host;
use crate::metrics;
use crate::refusal::{Answer, Refusal};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Ashlar",
        description = "RAID arrays of NVMe drives, volumes on them, and exports to virtual \
                       machines. Served on a Unix socket. All sizes are in bytes.",
        license(name = "Apache-2.0"),
        contact()
    ),
    servers((url = "http://localhost", description = "over the daemon's Unix socket")),
    tags(
        (name = "drives"), (name = "arrays"), (name = "spares"), (name = "volumes"),
        (name = "exports"),
        (name = "status")
    )
)]
struct Document;

/// The daemon's routes.
pub fn router(host: Arc<Host>) -> Router {
    let (router, document) = documented().with_state(host).split_for_parts();
    let document = Arc::new(document);
    let serve = move || async move { Json((*document).clone()) };
    let router = router.route("/v1/openapi.json", axum::routing::get(serve));
    router.fallback(unknown_route).method_not_allowed_fallback(unknown_method)
}

/// The OpenAPI document of this build.
pub fn openapi() -> utoipa::openapi::OpenApi {
    documented().split_for_parts().1
}

fn documented() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(status))
        .routes(routes!(metrics))
        .routes(routes!(upgrades, upgrade))
        .routes(routes!(list_drives, attach_drive))
        .routes(routes!(show_drive, detach_drive))
        .routes(routes!(clear_drive))
        .routes(routes!(list_arrays, create_array))
        .routes(routes!(scan_arrays))
        .routes(routes!(show_array, delete_array))
        .routes(routes!(start_array))
        .routes(routes!(stop_array))
        .routes(routes!(set_on_demand))
        .routes(routes!(replace_member))
        .routes(routes!(rebuild_array))
        .routes(routes!(scrub_array))
        .routes(routes!(grow_array))
        .routes(routes!(set_array))
        .routes(routes!(list_spares, add_spare))
        .routes(routes!(remove_spare))
        .routes(routes!(list_volumes, create_volume))
        .routes(routes!(show_volume, delete_volume))
        .routes(routes!(resize_volume))
        .routes(routes!(list_exports, create_export))
        .routes(routes!(show_export, delete_export))
        .routes(routes!(set_export))
        .routes(routes!(set_export_hosts))
        .routes(routes!(set_export_access))
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.http_status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(ErrorBody { error: self.error, fix: self.fix })).into_response()
    }
}

impl From<JsonRejection> for Refusal {
    fn from(rejection: JsonRejection) -> Refusal {
        Refusal::invalid(rejection.body_text()).fix("GET /v1/openapi.json describes each request")
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Refusal {
        Refusal::invalid(rejection.body_text()).fix("GET /v1/openapi.json describes each request")
    }
}

impl From<PathRejection> for Refusal {
    fn from(rejection: PathRejection) -> Refusal {
        Refusal::invalid(rejection.body_text()).fix("a name in a path is UTF-8, percent-encoded")
    }
}

/// A JSON body; a bad one is refused in our words.
#[derive(FromRequest)]
#[from_request(via(axum::Json), rejection(Refusal))]
struct Body<T>(T);

/// Query parameters; bad ones are refused in our words.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Refusal))]
struct Query<T>(T);

/// What stands in the path; what is no text is refused in our words.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Refusal))]
struct Path<T>(T);

type Reply<T> = Answer<Json<T>>;

async fn unknown_route() -> Refusal {
    Refusal::unknown("the API has no such path").fix("GET /v1/openapi.json lists all")
}

async fn unknown_method() -> Response {
    let (error, fix) = ("the path has no such method", "GET /v1/openapi.json lists those it has");
    let body = ErrorBody { error: error.into(), fix: Some(fix.into()) };
    (StatusCode::METHOD_NOT_ALLOWED, Json(body)).into_response()
}

/// Finishes a change also when its client has gone away: half a change is worse than none.
async fn finish<T: Send + 'static>(
    change: impl Future<Output = Answer<T>> + Send + 'static,
) -> Reply<T> {
    match tokio::spawn(change).await {
        Ok(answer) => answer.map(Json),
        Err(error) => Err(Refusal::failed(format!("an internal error: {error}"))),
    }
}

/// Everything on one screen
#[utoipa::path(get, path = "/v1/status", tag = "status", responses((status = 200, body = Status)))]
async fn status(State(host): State<Arc<Host>>) -> Json<Status> {
    Json(host.status().await)
}

/// Counters, gauges and histograms, in OpenMetrics' text format: what Prometheus reads
#[utoipa::path(get, path = "/metrics", tag = "status",
    responses((status = 200, body = String, content_type = metrics::CONTENT_TYPE),
        (status = "default", body = ErrorBody)))]
async fn metrics(State(host): State<Arc<Host>>) -> Answer<Response> {
    let text = metrics::text(host.status().await);
    let text = text.map_err(|error| Refusal::failed(format!("no metrics: {error}")))?;
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

/// What became of upgrades of the daemon
#[utoipa::path(get, path = "/v1/upgrade", tag = "status",
    responses((status = 200, body = Upgrades)))]
async fn upgrades(State(host): State<Arc<Host>>) -> Json<Upgrades> {
    Json(host.upgrades())
}

/// Let another program take the daemon's place
///
/// The answer is from before, and comes once that program was asked whether it can; then guests
/// stay connected and wait for a moment.
#[utoipa::path(post, path = "/v1/upgrade", tag = "status", request_body = UpgradeRequest,
    responses((status = 200, body = Upgrades), (status = "default", body = ErrorBody)))]
async fn upgrade(
    State(host): State<Arc<Host>>,
    Body(request): Body<UpgradeRequest>,
) -> Reply<Upgrades> {
    finish(async move { host.upgrade(request).await }).await
}

/// All drives
#[utoipa::path(get, path = "/v1/drives", tag = "drives", responses((status = 200, body = [Drive])))]
async fn list_drives(State(host): State<Arc<Host>>) -> Json<Vec<Drive>> {
    Json(host.list_drives().await)
}

/// One drive
#[utoipa::path(get, path = "/v1/drives/{name}", tag = "drives",
    params(("name" = String, Path)),
    responses((status = 200, body = Drive), (status = "default", body = ErrorBody)))]
async fn show_drive(State(host): State<Arc<Host>>, Path(name): Path<String>) -> Reply<Drive> {
    host.show_drive(&name).await.map(Json)
}

/// Attach a drive
///
/// Opens, claims and probes it. One that carries data is refused without `force`.
#[utoipa::path(post, path = "/v1/drives", tag = "drives", request_body = DriveAttach,
    responses((status = 200, body = Drive), (status = "default", body = ErrorBody)))]
async fn attach_drive(
    State(host): State<Arc<Host>>,
    Body(request): Body<DriveAttach>,
) -> Reply<Drive> {
    finish(async move { host.attach_drive(request).await }).await
}

/// Detach a drive
///
/// A member of a running array needs `force`: it is then pulled.
#[utoipa::path(delete, path = "/v1/drives/{name}", tag = "drives",
    params(("name" = String, Path), Force),
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn detach_drive(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Query(Force { force }): Query<Force>,
) -> Reply<Done> {
    finish(async move { host.detach_drive(&name, force).await }).await
}

/// Forget what went wrong with a drive
///
/// Its history becomes empty; nothing on it changes. Refused where nothing is known against it.
#[utoipa::path(post, path = "/v1/drives/{name}/clear", tag = "drives",
    params(("name" = String, Path)),
    responses((status = 200, body = Drive), (status = "default", body = ErrorBody)))]
async fn clear_drive(State(host): State<Arc<Host>>, Path(name): Path<String>) -> Reply<Drive> {
    finish(async move { host.clear_drive(&name).await }).await
}

/// All arrays
#[utoipa::path(get, path = "/v1/arrays", tag = "arrays", responses((status = 200, body = [Array])))]
async fn list_arrays(State(host): State<Arc<Host>>) -> Json<Vec<Array>> {
    Json(host.list_arrays().await)
}

/// One array
#[utoipa::path(get, path = "/v1/arrays/{name}", tag = "arrays",
    params(("name" = String, Path, description = "name or uuid")),
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn show_array(State(host): State<Arc<Host>>, Path(name): Path<String>) -> Reply<Array> {
    host.show_array(&name).await.map(Json)
}

/// Create an array of attached drives
#[utoipa::path(post, path = "/v1/arrays", tag = "arrays", request_body = ArrayCreate,
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn create_array(
    State(host): State<Arc<Host>>,
    Body(request): Body<ArrayCreate>,
) -> Reply<Array> {
    finish(async move { host.create_array(request).await }).await
}

/// Delete an array
///
/// Its drives are blank afterwards. Refused without `force` while it holds volumes.
#[utoipa::path(delete, path = "/v1/arrays/{name}", tag = "arrays",
    params(("name" = String, Path), Force),
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn delete_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Query(Force { force }): Query<Force>,
) -> Reply<Done> {
    finish(async move { host.delete_array(&name, force).await }).await
}

/// Start every array found on attached drives
///
/// `force`: also where absent members may hold newer data.
#[utoipa::path(post, path = "/v1/arrays/scan", tag = "arrays", params(Force),
    responses((status = 200, body = ScanResult), (status = "default", body = ErrorBody)))]
async fn scan_arrays(
    State(host): State<Arc<Host>>,
    Query(Force { force }): Query<Force>,
) -> Reply<ScanResult> {
    finish(async move { host.scan_arrays(force).await }).await
}

/// Start a stopped array
///
/// `force`: also if absent members may hold newer data; what only they hold is lost.
#[utoipa::path(post, path = "/v1/arrays/{name}/start", tag = "arrays",
    params(("name" = String, Path), Force),
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn start_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Query(Force { force }): Query<Force>,
) -> Reply<Array> {
    finish(async move { host.start_array(&name, force).await }).await
}

/// Have an array here only while guests want it
///
/// It is stopped once no ring of a guest is started, and its exports wait; and it is started when
/// one is, and no other host has the array.
#[utoipa::path(post, path = "/v1/arrays/{name}/on-demand", tag = "arrays",
    params(("name" = String, Path), On),
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn set_on_demand(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Query(On { on }): Query<On>,
) -> Reply<Array> {
    finish(async move { host.set_on_demand(&name, on).await }).await
}

/// Stop an array and its exports
///
/// Refused without `force` while a guest is connected. With it, what could not be put in place is
/// no failure either, and told in `error` of the answer.
#[utoipa::path(post, path = "/v1/arrays/{name}/stop", tag = "arrays",
    params(("name" = String, Path), Force),
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn stop_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Query(Force { force }): Query<Force>,
) -> Reply<Array> {
    finish(async move { host.stop_array(&name, force).await }).await
}

/// Give a member another drive and rebuild it
#[utoipa::path(post, path = "/v1/arrays/{name}/replace", tag = "arrays",
    params(("name" = String, Path)), request_body = ArrayReplace,
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn replace_member(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<ArrayReplace>,
) -> Reply<Array> {
    finish(async move { host.replace_member(&name, request).await }).await
}

/// Take drives that came back in again and rebuild them
#[utoipa::path(post, path = "/v1/arrays/{name}/rebuild", tag = "arrays",
    params(("name" = String, Path)),
    responses((status = 200, body = RebuildStarted), (status = "default", body = ErrorBody)))]
async fn rebuild_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
) -> Reply<RebuildStarted> {
    finish(async move { host.rebuild_array(&name).await }).await
}

/// Read and verify everything
#[utoipa::path(post, path = "/v1/arrays/{name}/scrub", tag = "arrays",
    params(("name" = String, Path)), request_body = ArrayScrub,
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn scrub_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<ArrayScrub>,
) -> Reply<Array> {
    finish(async move { host.scrub_array(&name, request).await }).await
}

/// Add members to an array, or use what all its drives have more by now, while it serves
///
/// With `add`, everything is moved to stripes over all members; there is more room once that is
/// done. Without, replace its drives by larger ones, or make them larger, before; refused if
/// nothing is gained.
#[utoipa::path(post, path = "/v1/arrays/{name}/grow", tag = "arrays",
    params(("name" = String, Path)), request_body = ArrayGrow,
    responses((status = 200, body = ArrayGrown), (status = "default", body = ErrorBody)))]
async fn grow_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<ArrayGrow>,
) -> Reply<ArrayGrown> {
    finish(async move { host.grow_array(&name, request).await }).await
}

/// Set what an operator can set, while the array runs
#[utoipa::path(post, path = "/v1/arrays/{name}/set", tag = "arrays",
    params(("name" = String, Path)), request_body = SettingsChange,
    responses((status = 200, body = Array), (status = "default", body = ErrorBody)))]
async fn set_array(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<SettingsChange>,
) -> Reply<Array> {
    finish(async move { host.set_array(&name, request).await }).await
}

/// All spares
#[utoipa::path(get, path = "/v1/spares", tag = "spares",
    responses((status = 200, body = [Spare])))]
async fn list_spares(State(host): State<Arc<Host>>) -> Json<Vec<Spare>> {
    Json(host.list_spares().await)
}

/// Keep a drive for members that are away for too long
#[utoipa::path(post, path = "/v1/spares", tag = "spares", request_body = SpareAdd,
    responses((status = 200, body = Spare), (status = "default", body = ErrorBody)))]
async fn add_spare(State(host): State<Arc<Host>>, Body(request): Body<SpareAdd>) -> Reply<Spare> {
    finish(async move { host.add_spare(request).await }).await
}

/// Keep a drive as a spare no longer
#[utoipa::path(delete, path = "/v1/spares/{drive}", tag = "spares",
    params(("drive" = String, Path)),
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn remove_spare(State(host): State<Arc<Host>>, Path(drive): Path<String>) -> Reply<Done> {
    finish(async move { host.remove_spare(&drive).await }).await
}

/// All volumes of running arrays
#[utoipa::path(get, path = "/v1/volumes", tag = "volumes",
    responses((status = 200, body = [Volume])))]
async fn list_volumes(State(host): State<Arc<Host>>) -> Json<Vec<Volume>> {
    Json(host.list_volumes().await)
}

/// One volume
#[utoipa::path(get, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "VOLUME, or ARRAY%2FVOLUME")),
    responses((status = 200, body = Volume), (status = "default", body = ErrorBody)))]
async fn show_volume(State(host): State<Arc<Host>>, Path(name): Path<String>) -> Reply<Volume> {
    host.show_volume(&name).await.map(Json)
}

/// Create a volume, all zero
#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = VolumeCreate,
    responses((status = 200, body = Volume), (status = "default", body = ErrorBody)))]
async fn create_volume(
    State(host): State<Arc<Host>>,
    Body(request): Body<VolumeCreate>,
) -> Reply<Volume> {
    finish(async move { host.create_volume(request).await }).await
}

/// Grow a volume, also while a guest uses it
#[utoipa::path(post, path = "/v1/volumes/{name}/resize", tag = "volumes",
    params(("name" = String, Path)), request_body = VolumeResize,
    responses((status = 200, body = Volume), (status = "default", body = ErrorBody)))]
async fn resize_volume(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<VolumeResize>,
) -> Reply<Volume> {
    finish(async move { host.resize_volume(&name, request).await }).await
}

/// Delete a volume; its space can be used again
#[utoipa::path(delete, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path)),
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn delete_volume(State(host): State<Arc<Host>>, Path(name): Path<String>) -> Reply<Done> {
    finish(async move { host.delete_volume(&name).await }).await
}

/// All exports
#[utoipa::path(get, path = "/v1/exports", tag = "exports",
    responses((status = 200, body = [Export])))]
async fn list_exports(State(host): State<Arc<Host>>) -> Json<Vec<Export>> {
    Json(host.list_exports().await)
}

/// One export
#[utoipa::path(get, path = "/v1/exports/{name}", tag = "exports",
    params(("name" = String, Path)),
    responses((status = 200, body = Export), (status = "default", body = ErrorBody)))]
async fn show_export(State(host): State<Arc<Host>>, Path(name): Path<String>) -> Reply<Export> {
    host.show_export(&name).await.map(Json)
}

/// Offer a volume to a guest, to hosts on the network or to this host
#[utoipa::path(post, path = "/v1/exports", tag = "exports", request_body = ExportCreate,
    responses((status = 200, body = Export), (status = "default", body = ErrorBody)))]
async fn create_export(
    State(host): State<Arc<Host>>,
    Body(request): Body<ExportCreate>,
) -> Reply<Export> {
    finish(async move { host.create_export(request).await }).await
}

/// Limit how fast an export may go
#[utoipa::path(post, path = "/v1/exports/{name}/set", tag = "exports",
    params(("name" = String, Path)), request_body = LimitsChange,
    responses((status = 200, body = Export), (status = "default", body = ErrorBody)))]
async fn set_export(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<LimitsChange>,
) -> Reply<Export> {
    finish(async move { host.set_export(&name, request).await }).await
}

/// Set which hosts may use an export, and what they have to prove
#[utoipa::path(post, path = "/v1/exports/{name}/hosts", tag = "exports",
    params(("name" = String, Path)), request_body = HostsChange,
    responses((status = 200, body = Export), (status = "default", body = ErrorBody)))]
async fn set_export_hosts(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<HostsChange>,
) -> Reply<Export> {
    finish(async move { host.set_export_hosts(&name, request).await }).await
}

/// Set who may connect to the socket of an export
#[utoipa::path(post, path = "/v1/exports/{name}/access", tag = "exports",
    params(("name" = String, Path)), request_body = SocketAccess,
    responses((status = 200, body = Export), (status = "default", body = ErrorBody)))]
async fn set_export_access(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Body(request): Body<SocketAccess>,
) -> Reply<Export> {
    finish(async move { host.set_export_access(&name, request).await }).await
}

/// Withdraw an export
///
/// Refused without `force` while a guest is connected.
#[utoipa::path(delete, path = "/v1/exports/{name}", tag = "exports",
    params(("name" = String, Path), Force),
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn delete_export(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
    Query(Force { force }): Query<Force>,
) -> Reply<Done> {
    finish(async move { host.delete_export(&name, force).await }).await
}
