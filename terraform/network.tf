# Only where it is needed: by a Cloud SQL instance with a private address, or for a fixed address
# towards the internet.

locals {
  has_network   = local.has_cloud_sql || var.static_egress_ip
  has_connector = local.has_network && var.egress_mode == "connector"

  # What of a function's traffic goes through the network: nothing, private addresses, or all. All
  # of it puts tenants and Google's own services behind the network's slow start, so only where a
  # fixed address is asked for.
  traffic = {
    for name in ["webhook", "subscriber", "retry"] : name => (
      var.static_egress_ip && contains(var.static_egress_functions, name) ? "ALL_TRAFFIC" :
      local.has_cloud_sql ? "PRIVATE_RANGES_ONLY" : null
    )
  }

  egress = {
    for name, traffic in local.traffic : name => {
      direct    = var.egress_mode == "direct" ? traffic : null
      connector = var.egress_mode == "connector" ? traffic : null
    }
  }
}

resource "google_compute_network" "this" {
  count = local.has_network ? 1 : 0

  # checkov:skip=CKV2_GCP_18: There is no machine in it to call. Without a rule, nothing gets in and everything gets out, as functions need.
  name                    = var.name
  auto_create_subnetworks = false

  depends_on = [time_sleep.services]
}

resource "google_compute_subnetwork" "functions" {
  count = local.has_network ? 1 : 0

  # checkov:skip=CKV_GCP_26: Flow logs cost more than all else here; the functions log what they connect to and why it failed.
  name                     = "${var.name}-functions"
  region                   = var.region
  network                  = google_compute_network.this[0].id
  ip_cidr_range            = var.network_ranges.functions
  private_ip_google_access = true # Pub/Sub and secrets stay reachable when all traffic comes this way
}

resource "google_vpc_access_connector" "this" {
  count = local.has_connector ? 1 : 0

  name          = var.name
  region        = var.region
  network       = google_compute_network.this[0].name
  ip_cidr_range = var.network_ranges.connector
  machine_type  = "e2-micro"
  min_instances = 2
  max_instances = 3
}

# The addresses that Cloud SQL takes from the network.
resource "google_compute_global_address" "services" {
  count = local.has_cloud_sql ? 1 : 0

  name          = "${var.name}-services"
  network       = google_compute_network.this[0].id
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  prefix_length = 24
}

resource "google_service_networking_connection" "services" {
  count = local.has_cloud_sql ? 1 : 0

  network                 = google_compute_network.this[0].id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.services[0].name]

  # Google holds its end for hours after the instance is gone, and a plain delete waits for it.
  deletion_policy = "REMOVE_PEERING"
}

resource "google_compute_address" "egress" {
  count = var.static_egress_ip ? 1 : 0

  name         = "${var.name}-egress"
  region       = var.region
  address_type = "EXTERNAL"

  depends_on = [time_sleep.services]
}

resource "google_compute_router" "egress" {
  count = var.static_egress_ip ? 1 : 0

  name    = "${var.name}-egress"
  region  = var.region
  network = google_compute_network.this[0].id
}

resource "google_compute_router_nat" "egress" {
  count = var.static_egress_ip ? 1 : 0

  name                               = "${var.name}-egress"
  region                             = var.region
  router                             = google_compute_router.egress[0].name
  nat_ip_allocate_option             = "MANUAL_ONLY"
  nat_ips                            = [google_compute_address.egress[0].self_link]
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"

  # One address has 64,512 ports. An instance with 50 tenants of 4 connections needs 200.
  enable_dynamic_port_allocation      = true
  enable_endpoint_independent_mapping = false
  min_ports_per_vm                    = 64
  max_ports_per_vm                    = 1024

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}
