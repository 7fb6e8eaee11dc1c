# SPDX-License-Identifier: Apache-2.0
# Spot VMs with a GPU: one, or several of one job.  After a preemption a managed instance group creates the VM again,
# in any zone of the region with capacity.  The service account has exactly the permissions of
# ../../permissions/gcp-vm.yaml.

terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 8.7" # with preemption_notice_duration
    }
  }
}

variable "project" {
  type        = string
  description = "Project of all resources."
}

variable "region" {
  type        = string
  default     = "us-central1"
  description = "Region of the group, preferably also of the bucket."
}

variable "zones" {
  type        = list(string)
  default     = ["us-central1-a", "us-central1-b", "us-central1-c"]
  description = "All zones that have the machine type, to find spare GPUs."
}

variable "run" {
  type        = string
  description = "Name of the training run, which names the group too: small letters, digits and dashes."
}

variable "bucket" {
  type        = string
  description = "An existing bucket, best with soft delete."
}

variable "prefix" {
  type        = string
  default     = "checkpoints"
  description = "Checkpoints go below it."
}

variable "vms" {
  type        = number
  default     = 1
  description = "VMs of the job; several only if one launcher starts the ranks on all of them."
}

variable "on_demand" {
  type        = number
  default     = 0
  description = "VMs on demand, the others are Spot. 1: one VM of the job is not preempted."
}

variable "machine_type" {
  type        = string
  default     = "g2-standard-8"
  description = "A type that brings its GPU."
}

variable "image_name" {
  type        = string
  default     = "swansong"
  description = "As given to Packer: the family; its newest image is taken."
}

variable "disk_type" {
  type        = string
  default     = "pd-balanced"
  description = "Type of the boot disk; newer machine types accept only hyperdisk-balanced."
}

variable "disk_gb" {
  type        = number
  default     = 100
  description = "Boot disk: the image, and staging where the VM has no local SSD. Not less than the image has."
}

variable "network" {
  type        = string
  default     = "default"
  description = "A network with automatic subnetworks; the VM needs access to Cloud Storage and accepts no connections."
}

variable "subnetwork" {
  type        = string
  default     = null
  description = "Subnetwork of the region, in a network with custom subnetworks; overrides network."
}

variable "external_ip" {
  type        = bool
  default     = true
  description = "Without it the subnetwork needs Private Google Access or Cloud NAT, or the VM does not reach the bucket."
}

variable "preemption_notice_s" {
  type        = number
  default     = 0
  description = "120: the notice comes two minutes ahead. 0: it comes with the soft-off, 30 s before the end."

  validation {
    condition     = contains([0, 120], var.preemption_notice_s)
    error_message = "preemption_notice_s is 0 or 120: Compute Engine has no other value."
  }
}

locals {
  role  = yamldecode(file("${path.module}/../../permissions/gcp-vm.yaml"))
  group = "swansong-${var.run}"
  # Accounts have at most 30 characters, and two runs in one project have an account each.
  id = substr(sha256(var.run), 0, 12)
  # All VMs of a template are Spot or on demand, so each model has a template and a group.
  models = {
    for model, vms in { SPOT = var.vms - var.on_demand, STANDARD = var.on_demand } : model => vms if vms > 0
  }
}

resource "google_service_account" "vm" {
  project      = var.project
  account_id   = "swansong-${local.id}"
  display_name = "VMs of run ${var.run}"
}

resource "google_project_iam_custom_role" "vm" {
  project     = var.project
  role_id     = "swansong_${local.id}"
  title       = local.role.title
  description = local.role.description
  stage       = local.role.stage
  permissions = local.role.includedPermissions
}

resource "google_storage_bucket_iam_member" "vm" {
  bucket = var.bucket
  role   = google_project_iam_custom_role.vm.id
  member = "serviceAccount:${google_service_account.vm.email}"
}

resource "google_compute_instance_template" "vm" {
  for_each     = local.models
  project      = var.project
  name_prefix  = "swansong-"
  machine_type = var.machine_type

  # monitoring/prometheus/scrape.example.yml finds the VM by these two.
  tags   = ["swansong"]
  labels = { run = var.run }

  disk {
    source_image = "projects/${var.project}/global/images/family/${var.image_name}"
    boot         = true
    auto_delete  = true
    disk_type    = var.disk_type
    disk_size_gb = var.disk_gb
  }

  network_interface {
    network    = var.subnetwork == null ? var.network : null
    subnetwork = var.subnetwork

    dynamic "access_config" {
      for_each = var.external_ip ? [1] : []
      content {}
    }
  }

  scheduling {
    provisioning_model          = each.key
    preemptible                 = each.key == "SPOT"
    automatic_restart           = each.key != "SPOT"
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = each.key == "SPOT" ? "STOP" : null

    dynamic "preemption_notice_duration" {
      for_each = each.key == "SPOT" && var.preemption_notice_s > 0 ? [var.preemption_notice_s] : []
      content {
        seconds = preemption_notice_duration.value
      }
    }
  }

  service_account {
    email  = google_service_account.vm.email
    scopes = ["cloud-platform"]
  }

  metadata_startup_script = templatefile("${path.module}/../../first-boot/gcp-startup.sh", {
    run    = var.run
    store  = "gs://${var.bucket}/${var.prefix}"
    notice = var.preemption_notice_s
  })

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_region_instance_group_manager" "vm" {
  for_each                         = local.models
  project                          = var.project
  name                             = "${local.group}-${lower(each.key)}"
  region                           = var.region
  base_instance_name               = local.group
  target_size                      = each.value
  distribution_policy_zones        = var.zones
  distribution_policy_target_shape = "ANY"

  version {
    instance_template = google_compute_instance_template.vm[each.key].id
  }

  # Never a replacement beside a VM that still trains: it would take the run over from that VM.
  update_policy {
    type                         = "OPPORTUNISTIC"
    minimal_action               = "REPLACE"
    replacement_method           = "RECREATE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = length(var.zones)
  }

  depends_on = [google_storage_bucket_iam_member.vm]
}
