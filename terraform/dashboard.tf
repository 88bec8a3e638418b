# The pipeline from left to right, one column a stage: what comes in, how fast, what goes wrong.

locals {
  columns = concat(
    [
      {
        title = "1 · Webhook"
        tiles = [
          { title = "Deliveries per second, by answer", query = "sum by (response_code_class) (rate(run_googleapis_com:request_count{${local.function.webhook}}[$${__interval}]))" },
          { title = "Answer time, median and 99 % (ms)", query = "histogram_quantile(0.99, sum by (le) (rate(run_googleapis_com:request_latencies_bucket{${local.function.webhook}}[$${__interval}])))", second = "histogram_quantile(0.5, sum by (le) (rate(run_googleapis_com:request_latencies_bucket{${local.function.webhook}}[$${__interval}])))" },
          { title = "Refused, deferred, unavailable", query = "sum by (event) (increase(${local.events}{event=~\"webhook[.](refused|audit_deferred|publish_deferred|unavailable)\"}[$${__interval}]))" },
        ]
      },
      {
        title = "2 · Pub/Sub"
        tiles = [
          { title = "Pushes per second, by answer", query = "sum by (response_class) (rate(pubsub_googleapis_com:subscription_push_request_count{${local.push}}[$${__interval}]))" },
          { title = "Age of the oldest message (s)", query = "max(pubsub_googleapis_com:subscription_oldest_unacked_message_age{${local.push}})" },
          { title = "Waiting, and dead letters", query = "max(pubsub_googleapis_com:subscription_num_undelivered_messages{${local.push}})", second = "max(pubsub_googleapis_com:subscription_num_undelivered_messages{${local.dead}})" },
        ]
      },
      {
        title = "3 · Subscriber"
        tiles = [
          { title = "Stored and kept, per second", query = "sum by (event) (rate(${local.events}{event=~\"event[.]stored|failure[.].*\"}[$${__interval}]))" },
          { title = "Time to store, median and 99 % (ms)", query = "histogram_quantile(0.99, sum by (le) (rate(${local.stored}_bucket[$${__interval}])))", second = "histogram_quantile(0.5, sum by (le) (rate(${local.stored}_bucket[$${__interval}])))" },
          { title = "Receipt to row, median and 99 % (ms)", query = "histogram_quantile(0.99, sum by (le) (rate(${local.lag}_bucket[$${__interval}])))", second = "histogram_quantile(0.5, sum by (le) (rate(${local.lag}_bucket[$${__interval}])))" },
          { title = "Instances, by function", query = "sum by (service_name) (run_googleapis_com:container_instance_count{${local.on_run},service_name=~\"${var.name}-.*\"})" },
        ]
      },
      {
        title = "4 · Retry"
        tiles = [
          { title = "Replays, by verdict", query = "sum by (event, verdict) (increase(${local.events}{event=~\"replay[.](succeeded|failed)\"}[$${__interval}]))" },
          { title = "Incidents opened and ended", query = "sum by (event) (increase(${local.events}{event=~\"incident[.].*\"}[$${__interval}]))" },
          { title = "Runs, and failures of functions", query = "sum by (event) (increase(${local.events}{event=~\"replay[.](finished|unavailable)|outbox[.].*|function[.]failed\"}[$${__interval}]))" },
        ]
      },
    ],
    local.has_cloud_sql ? [
      {
        title = "5 · Application database"
        tiles = [
          { title = "Connections", query = "sum(cloudsql_googleapis_com:database_postgresql_num_backends{${local.database}})" },
          { title = "Processor (share)", query = "max(cloudsql_googleapis_com:database_cpu_utilization{${local.database}})" },
          { title = "Disk (share)", query = "max(cloudsql_googleapis_com:database_disk_utilization{${local.database}})" },
        ]
      },
    ] : [],
  )

  column_width = floor(48 / length(local.columns))

  headings = [
    for place, column in local.columns : {
      xPos   = place * local.column_width
      yPos   = 0
      width  = local.column_width
      height = 3
      widget = { title = column.title, text = { content = "", format = "MARKDOWN" } }
    }
  ]

  charts = flatten([
    for place, column in local.columns : [
      for row, tile in column.tiles : {
        xPos   = place * local.column_width
        yPos   = 3 + row * 12
        width  = local.column_width
        height = 12
        widget = {
          title = tile.title
          xyChart = {
            dataSets = [
              for query in compact([tile.query, try(tile.second, "")]) : {
                plotType        = "LINE"
                timeSeriesQuery = { prometheusQuery = query }
              }
            ]
          }
        }
      }
    ]
  ])
}

resource "google_monitoring_dashboard" "pipeline" {
  dashboard_json = jsonencode({
    displayName  = "${var.name}: the pipeline"
    mosaicLayout = { columns = 48, tiles = concat(local.headings, local.charts) }
  })

  depends_on = [google_logging_metric.events, google_logging_metric.stored_milliseconds, google_logging_metric.lag_milliseconds]
}
